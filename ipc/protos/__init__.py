"""The protobuf messages of the tensor protocols, made from the .proto files by `make protos`.

Protocol packages, the repository and tests import this package.
"""
