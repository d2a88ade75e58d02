"""A greedy sampler, until there is the real one."""

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import torch

# Threads that spin for a core they do not get make a test of one second last minutes.
torch.set_num_threads(1)


@dataclass
class Sampled:
    token_ids: list
    logprobs: list


class Sampler:
    def __init__(self, vocabulary, device):
        pass

    def sample(self, logits, rows):
        assert len(rows) == len(logits)
        return Sampled(logits.argmax(-1).tolist() if rows else [], [None] * len(rows))


if find_spec("pcomm.inference.engine.sampler") is None:
    module = ModuleType("pcomm.inference.engine.sampler")
    module.Sampled, module.Sampler = Sampled, Sampler
    sys.modules[module.__name__] = module
