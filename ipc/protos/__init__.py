"""The protobuf messages of the tensor protocols; the modules are made from the .proto files by `make protos`."""
