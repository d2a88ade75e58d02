from pcomm.inference.engine.engine_stats import EngineStats as EngineStats
from pcomm.inference.engine.engine_stats import PoolUse as PoolUse
from pcomm.inference.engine.request import FinishReason as FinishReason
from pcomm.inference.engine.request import TokenLogprobs as TokenLogprobs
from pcomm.inference.engine.request_queue import QueueFullError as QueueFullError
from pcomm.inference.engine.sampling.structured.compiled_grammar import (
    CompiledGrammar as CompiledGrammar,
)
from pcomm.inference.engine.sampling.structured.grammar_compiler import (
    GrammarCompiler as GrammarCompiler,
)
