"""Language models trained and run on the pcomm packages."""

from importlib.metadata import version
from typing import TYPE_CHECKING

from pcomm.core.face import face

if TYPE_CHECKING:
    from pcomm.integration.config import Config, ModelConfig, ParallelConfig, TrainConfig
    from pcomm.integration.config_file import apply_overrides, load_config
    from pcomm.integration.config_rules import validate
    from pcomm.integration.generate.writer import Writer
    from pcomm.integration.models.language_model import LanguageModel
    from pcomm.integration.parallelize import (
        build_model,
        open_run_groups,
        plan_sequences,
        shard_parameters,
    )
    from pcomm.integration.train.run import run_training
    from pcomm.integration.train.trainer import Trainer

__all__ = [
    "Config",
    "LanguageModel",
    "ModelConfig",
    "ParallelConfig",
    "TrainConfig",
    "Trainer",
    "Writer",
    "apply_overrides",
    "build_model",
    "load_config",
    "open_run_groups",
    "plan_sequences",
    "run_training",
    "shard_parameters",
    "validate",
]

__version__ = version("pcomm-integration")
__getattr__, __dir__ = face(
    __name__,
    {
        "Config": "config",
        "LanguageModel": "models.language_model",
        "ModelConfig": "config",
        "ParallelConfig": "config",
        "TrainConfig": "config",
        "Trainer": "train.trainer",
        "Writer": "generate.writer",
        "apply_overrides": "config_file",
        "build_model": "parallelize",
        "load_config": "config_file",
        "open_run_groups": "parallelize",
        "plan_sequences": "parallelize",
        "run_training": "train.run",
        "shard_parameters": "parallelize",
        "validate": "config_rules",
    },
)
