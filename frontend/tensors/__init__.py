"""What the tensor protocols share: requests of named tensors, what may be asked of which model, and how it is run.

A protocol parses into a `request.TensorRequest`, calls `running.run`, and renders a `result.TensorResult`.
"""
