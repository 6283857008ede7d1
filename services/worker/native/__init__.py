"""The native CPU library: C++ kernels, built at first use with the machine's compiler."""
