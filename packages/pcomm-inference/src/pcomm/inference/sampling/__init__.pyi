from pcomm.inference.sampling.grammars import CompiledGrammar as CompiledGrammar
from pcomm.inference.sampling.grammars import GrammarCompiler as GrammarCompiler
from pcomm.inference.sampling.params import TokenLogprobs as TokenLogprobs
