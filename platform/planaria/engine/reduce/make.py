"""Which way the replicas of a job are joined."""

from __future__ import annotations

from planaria.config import CommunicationConfig
from planaria.engine.reduce.codecs import Bf16, Int8
from planaria.engine.reduce.encoded import EncodedSync
from planaria.engine.reduce.local_updates import LocalUpdates
from planaria.engine.reduce.plain import PlainSync
from planaria.engine.reduce.powersgd import PowerSGD
from planaria.engine.reduce.protocol import ReplicaSync, Setting
from planaria.layout import LayoutError


def replicas_by_fsdp(config: CommunicationConfig) -> bool:
    """Whether FSDP2 adds up the gradients of the replicas; else it must not know of their axis."""
    return config.compression == "none" and config.sync_every is None


def make_sync(setting: Setting) -> ReplicaSync:
    """The way that ``setting.config`` asks for.

    Raises:
        LayoutError: it remembers something of each parameter, and pipeline stages do not know all parameters.
    """
    config = setting.config
    if setting.layout.pp > 1 and (config.sync_every is not None or config.compression in ("int8", "powersgd")):
        raise LayoutError(
            "communication.compression: int8 and powersgd, and communication.sync_every, do not go with pipeline "
            "parallelism yet; set layout.pp=1, or compression: bf16"
        )
    if config.sync_every is not None:
        return LocalUpdates(setting, config.sync_every)
    match config.compression:
        case "bf16":
            return EncodedSync(setting, Bf16(), feedback=False)
        case "int8":
            return EncodedSync(setting, Int8(), feedback=True)
        case "powersgd":
            return PowerSGD(setting)
        case "none":
            return PlainSync(setting)
