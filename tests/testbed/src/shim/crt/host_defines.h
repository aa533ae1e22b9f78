// The wheels carry CUDA's headers but not crt/, which comes with the compiler. This stands in for it: in host code
// these words mean nothing, except the alignments.
#pragma once

#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __no_return__ __attribute__((noreturn))
#define __specialization_static

#define __host__
#define __device__
#define __global__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __annotate__(a)
#define __location__(a)

#define CUDARTAPI
#define CUDARTAPI_CDECL
