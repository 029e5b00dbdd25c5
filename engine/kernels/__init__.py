"""Our own CPU kernels: C++ behind a C interface, built when Pequod is installed, chosen for the processor at run time.

`build` compiles the library and finds it, `library` loads it and decides what computes the products, `matmul` is
the packed matrix product; attention's side is engine/attention/cpu.py. `python -m engine.kernels.bench` measures.
"""
