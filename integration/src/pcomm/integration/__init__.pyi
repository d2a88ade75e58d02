from pcomm.integration.config.rules import validate as validate
from pcomm.integration.config.sections import Config as Config
from pcomm.integration.config.sections import ModelConfig as ModelConfig
from pcomm.integration.config.sections import ParallelConfig as ParallelConfig
from pcomm.integration.config.sections import TrainConfig as TrainConfig
from pcomm.integration.config.toml import apply_overrides as apply_overrides
from pcomm.integration.config.toml import load_config as load_config
from pcomm.integration.models.language_model import LanguageModel as LanguageModel
from pcomm.integration.parallelize import build_model as build_model
from pcomm.integration.parallelize import open_run_groups as open_run_groups
from pcomm.integration.parallelize import plan_sequences as plan_sequences
from pcomm.integration.parallelize import shard_parameters as shard_parameters
from pcomm.integration.train.run import run_training as run_training
from pcomm.integration.train.trainer import Trainer as Trainer

__version__: str
