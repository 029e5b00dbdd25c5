// What the assembler of this compiler knows.
#pragma once

// AVX-VNNI: since binutils 2.36, which is older than gcc 11, and LLVM 12. An older compiler emulates the instruction,
// and `pequod_features` does not report it, so that the avx2 variant is used.
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define ASSEMBLES_AVX_VNNI 1
#endif
