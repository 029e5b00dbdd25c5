"""CPU kernels: C++ with a C interface, compiled when Pequod is installed, selected for the processor at run time.

`build` compiles the library and finds it, `library` loads it and decides what computes the products, `product` is
the packed matrix product; attention's side is engine/attention/cpu.py. `python -m engine.bench.kernels` measures.
"""
