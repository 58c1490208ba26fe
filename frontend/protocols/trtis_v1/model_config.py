"""A model's configuration in the form of this contract, from the neutral one."""

from __future__ import annotations

from frontend.tensors import config_messages
from ipc.catalog.model_config import ModelConfig
from ipc.protos import trtis_v1_pb2 as pb


def config_of(config: ModelConfig, name: str) -> pb.ModelConfig:
    """The configuration under the `name` that clients ask for.

    This contract has no tensor without dims: such a one is shown as one element, which the model takes without a shape.
    """
    message: pb.ModelConfig = config_messages.message_of(pb, config, name)
    shown: list[pb.ModelInput | pb.ModelOutput] = [*message.input, *message.output]
    for tensor in shown:
        if not tensor.dims:
            tensor.dims.append(1)
            tensor.reshape.SetInParent()
    return message


def datatype_of(name: str) -> pb.DataType:
    """A datatype by its name in `ipc.memory.datatypes`; BF16, which this contract lacks, is TYPE_INVALID."""
    found: pb.DataType = config_messages.datatype_of(pb, name)
    return found
