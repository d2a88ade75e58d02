from pcomm.integration.llm.engine_size import MemorySize as MemorySize
from pcomm.integration.llm.llm import LLM as LLM
from pcomm.integration.llm.loading import LoadedModel as LoadedModel
from pcomm.integration.llm.loading import LoadedText as LoadedText
from pcomm.integration.llm.loading import load_model as load_model
from pcomm.integration.llm.open_requests import Delta as Delta
from pcomm.integration.llm.open_requests import Generation as Generation
from pcomm.integration.llm.open_requests import StepEngine as StepEngine
