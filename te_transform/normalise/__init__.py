"""One spelling per operation: every recorded graph in the words of vocabulary.py."""

from __future__ import annotations

from te_transform.normalise.activations import ACTIVATIONS, put_gates_first
from te_transform.normalise.attention import ATTENTION
from te_transform.normalise.grouped import GROUPED_QUERIES
from te_transform.normalise.linears import BIASES, FLATTENED, LINEARS
from te_transform.normalise.noise import drop_noise
from te_transform.normalise.norms import NORMS
from te_transform.normalise.products import spell_products
from te_transform.normalise.rotary import ROTARY
from te_transform.normalise.spelling import spell
from te_transform.normalise.word import write
from te_transform.trace import Recording

__all__ = ["normalise"]


def normalise(recording: Recording) -> Recording:
    """Rewrite the recording's graph, in place, into the words of the vocabulary; the rest stays torch's.

    The graph runs and computes what was recorded, up to rounding: a word may round elsewhere than the model.
    """
    spell(recording)
    spell_products(recording)
    drop_noise(recording)
    for words in (LINEARS, BIASES, FLATTENED, NORMS, ACTIVATIONS, ROTARY, ATTENTION, GROUPED_QUERIES):
        write(recording, words)
    put_gates_first(recording)
    drop_noise(recording)
    return recording
