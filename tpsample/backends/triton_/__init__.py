"""The backend of a GPU: launches, and in `kernels` what they launch."""
