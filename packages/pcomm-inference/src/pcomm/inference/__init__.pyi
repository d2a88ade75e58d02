from pcomm.inference.attention.paged_attention import paged_attention as paged_attention
from pcomm.inference.attention.turn import HeadTurn as HeadTurn
from pcomm.inference.engine.engine import Engine as Engine
from pcomm.inference.engine.request import Request as Request
from pcomm.inference.engine.request import RequestOutput as RequestOutput
from pcomm.inference.model import KVMemory as KVMemory
from pcomm.inference.model import KVSpec as KVSpec
from pcomm.inference.model import LayerMemory as LayerMemory
from pcomm.inference.model import LayerSpec as LayerSpec
from pcomm.inference.model import Model as Model
from pcomm.inference.model import StateMemory as StateMemory
from pcomm.inference.model import StateSpec as StateSpec
from pcomm.inference.model import StepBatch as StepBatch
from pcomm.inference.sampling.params import SamplingParams as SamplingParams
from pcomm.inference.text import TextStream as TextStream
from pcomm.inference.text import Tokenizer as Tokenizer
from pcomm.inference.transformers.adapter import TransformersModel as TransformersModel

__version__: str
