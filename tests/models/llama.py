"""The Llama that is measured, and whose memory is predicted: the shape of the 8B model, with fewer layers."""

from transformers import LlamaConfig


def shape_of_8b(layers: int, vocab_size: int, length: int) -> LlamaConfig:
    """Hidden 4096, ffn 14336, 32 heads, 8 groups; sequences of up to `length` tokens, no cache."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=length,
        use_cache=False,
        attn_implementation="sdpa",
    )
