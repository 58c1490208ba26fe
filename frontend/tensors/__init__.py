"""What the tensor protocols share: requests of named tensors, what may be asked of which model, and how it is run.

A protocol parses into a `request.TensorRequest`, calls `inference.TensorInference`, and renders a `TensorResult`.
"""
