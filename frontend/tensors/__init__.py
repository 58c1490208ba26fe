"""What the tensor protocols share: requests of named tensors, what may be asked of which model, and how it is run.

KServe and TRTIS parse into a `TensorRequest` and call `inference`. Encode, score, extract and chat do not come here.
"""
