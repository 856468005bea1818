"""`yalis bench kernels`: times kernels against torch and the device's roofline, and tunes GEMM launches."""
