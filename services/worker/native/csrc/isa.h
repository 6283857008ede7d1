// The level that this library is compiled for: the build passes -DSL_LEVEL=<n> and the flags of it.
#pragma once

#define SL_BASELINE 0
#define SL_AVX2 1
#define SL_AVX512 2
#define SL_AVX512_BF16 3
#define SL_AMX 4

#ifndef SL_LEVEL
#define SL_LEVEL SL_BASELINE
#endif

#define SL_EXPORT __attribute__((visibility("default")))

namespace sl {

// Asks the kernel for what the level needs (AMX state must be requested once per process).
// Returns false if the kernel refuses.
bool enable_level();

#if SL_LEVEL >= SL_AMX
// The configuration that every tile function finds: 8 tiles of 16 rows of 64 bytes. The pool loads
// it; whoever loads another one in a tile function calls this before it returns.
void amx_standard_config();
#else
inline void amx_standard_config() {}
#endif

}  // namespace sl
