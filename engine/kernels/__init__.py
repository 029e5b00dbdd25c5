"""CPU kernels: C++ with a C interface, compiled when Pequod is installed, selected for the processor at run time.

`build` compiles and finds the library, `library` loads it and chooses what computes matmuls, `matmul` multiplies by
packed weights, `logits` samples. engine/attention/cpu.py calls the attention kernels. `python -m engine.bench.kernels`
measures.
"""
