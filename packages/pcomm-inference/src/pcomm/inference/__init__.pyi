from pcomm.inference.attention.paged_attention import paged_attention as paged_attention
from pcomm.inference.engine.engine import Engine as Engine
from pcomm.inference.engine.request import Request as Request
from pcomm.inference.engine.request import RequestOutput as RequestOutput
from pcomm.inference.engine.sampling.sampling_params import SamplingParams as SamplingParams
from pcomm.inference.memory import KVMemory as KVMemory
from pcomm.inference.memory import LayerMemory as LayerMemory
from pcomm.inference.memory import StateMemory as StateMemory
from pcomm.inference.model import KVSpec as KVSpec
from pcomm.inference.model import LayerSpec as LayerSpec
from pcomm.inference.model import Model as Model
from pcomm.inference.model import StateSpec as StateSpec
from pcomm.inference.step_batch import StepBatch as StepBatch
from pcomm.inference.text.text_stream import TextStream as TextStream
from pcomm.inference.text.tokenizer import Tokenizer as Tokenizer

__version__: str
