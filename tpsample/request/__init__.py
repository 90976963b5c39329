"""What a request asks for, and a batch of requests as tensors."""
