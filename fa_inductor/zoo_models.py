"""The zoo's inhabitants: tiny configurations of transformers architectures and what they take as input."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BATCH, LENGTH, VOCABULARY = 2, 16, 64


@dataclass(frozen=True)
class Inhabitant:
    """A configuration class of transformers, its arguments, and its inputs."""

    config: str
    options: dict[str, Any] = field(hash=False)
    inputs: str = "ids"
    """``ids``, ``padded`` (ids and a padding mask), ``pair`` (padded encoder, decoder ids), ``pixels``, ``audio`` (mel spectrogram and decoder ids) or ``wave``."""
    cache: bool = True
    """The model takes ``use_cache``."""
    side: int = 32
    """Of the images, in pixels."""
    attention: tuple[str, ...] = ("eager", "sdpa")
    """Implementations that the model has in transformers."""


_SMALL: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
_TEXT: dict[str, Any] = dict(**_SMALL, vocab_size=VOCABULARY)
_GROUPED: dict[str, Any] = dict(**_TEXT, num_key_value_heads=2)
_STILL: dict[str, Any] = dict(attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
_VISION: dict[str, Any] = dict(**_SMALL, image_size=32, patch_size=8)
_EXPERTS: dict[str, Any] = dict(num_local_experts=2, num_experts_per_tok=1)
_LAYERS: dict[str, Any] = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                               decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32)


def _encoder(config: str, **more: Any) -> Inhabitant:
    return Inhabitant(config, dict(**_TEXT, **_STILL, **more), "padded", cache=False)


CORE: dict[str, Inhabitant] = {
    "llama": Inhabitant("LlamaConfig", _GROUPED),
    "mistral": Inhabitant("MistralConfig", dict(**_GROUPED, sliding_window=4)),
    "qwen3": Inhabitant("Qwen3Config", dict(**_GROUPED, head_dim=8)),
    "gemma": Inhabitant("GemmaConfig", dict(**_GROUPED, head_dim=8)),
    "bert": _encoder("BertConfig"),
    "vit": Inhabitant("ViTConfig", dict(**_VISION, **_STILL), "pixels", cache=False),
    "gpt2": Inhabitant("GPT2Config", dict(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, attn_pdrop=0.0,
                                          resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1, eos_token_id=2)),
    "whisper": Inhabitant("WhisperConfig", dict(
        **_LAYERS, d_model=32, vocab_size=VOCABULARY, max_source_positions=LENGTH, num_mel_bins=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0), "audio"),
}
"""What the zoo shows without ``--all``."""

MODELS: dict[str, Inhabitant] = {
    **CORE,
    "mixtral": Inhabitant("MixtralConfig", dict(**_GROUPED, **_EXPERTS)),
    "qwen2": Inhabitant("Qwen2Config", _GROUPED),
    "gemma2": Inhabitant("Gemma2Config", dict(**_GROUPED, head_dim=8, sliding_window=4), attention=("eager",)),
    "gemma3_text": Inhabitant("Gemma3TextConfig", dict(**_GROUPED, head_dim=8, sliding_window=4)),
    "gpt_neox": Inhabitant("GPTNeoXConfig", dict(**_TEXT, attention_dropout=0.0, hidden_dropout=0.0)),
    "gptj": Inhabitant("GPTJConfig", dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=VOCABULARY,
                                          attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0), attention=("eager",)),
    "opt": Inhabitant("OPTConfig", dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=32,
                                        vocab_size=VOCABULARY, dropout=0.0, attention_dropout=0.0,
                                        word_embed_proj_dim=32)),
    "bloom": Inhabitant("BloomConfig", dict(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCABULARY,
                                            attention_dropout=0.0, hidden_dropout=0.0), attention=("eager",)),
    "falcon": Inhabitant("FalconConfig", dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                              vocab_size=VOCABULARY, attention_dropout=0.0, hidden_dropout=0.0)),
    "falcon_alibi": Inhabitant("FalconConfig", dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY, attention_dropout=0.0,
        hidden_dropout=0.0, alibi=True, new_decoder_architecture=False, multi_query=False)),
    "mpt": Inhabitant("MptConfig", dict(d_model=32, n_heads=4, n_layers=2, vocab_size=VOCABULARY, max_seq_len=64),
                      attention=("eager",)),
    "phi": Inhabitant("PhiConfig", _TEXT),
    "phi3": Inhabitant("Phi3Config", dict(**_GROUPED, pad_token_id=0)),
    "cohere": Inhabitant("CohereConfig", _GROUPED),
    "olmo2": Inhabitant("Olmo2Config", _GROUPED),
    "gpt_oss": Inhabitant("GptOssConfig", dict(**_GROUPED, **_EXPERTS, head_dim=8, sliding_window=4),
                          attention=("eager",)),
    "gpt_oss_padded": Inhabitant("GptOssConfig", dict(**_GROUPED, **_EXPERTS, head_dim=8, sliding_window=4), "padded",
                                 attention=("eager",)),
    "llama_padded": Inhabitant("LlamaConfig", _GROUPED, "padded"),
    "mistral_padded": Inhabitant("MistralConfig", dict(**_GROUPED, sliding_window=4), "padded"),
    "deepseek_v3": Inhabitant("DeepseekV3Config", dict(
        **_TEXT, moe_intermediate_size=16, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8)),
    "roberta": _encoder("RobertaConfig"),
    "xlm_roberta": _encoder("XLMRobertaConfig"),
    "distilbert": Inhabitant("DistilBertConfig", dict(dim=32, n_layers=2, n_heads=4, hidden_dim=32,
                                                      vocab_size=VOCABULARY, dropout=0.0, attention_dropout=0.0),
                             "padded", cache=False),
    "albert": _encoder("AlbertConfig", embedding_size=16),
    "electra": _encoder("ElectraConfig", embedding_size=16),
    "modernbert": Inhabitant("ModernBertConfig", dict(**_TEXT, local_attention=8, global_attn_every_n_layers=2,
                                                      pad_token_id=0), "padded", cache=False),
    "t5": Inhabitant("T5Config", dict(d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, vocab_size=VOCABULARY,
                                      dropout_rate=0.0), "pair", attention=("eager",)),
    "bart": Inhabitant("BartConfig", dict(**_LAYERS, d_model=32, vocab_size=VOCABULARY, dropout=0.0,
                                          attention_dropout=0.0, max_position_embeddings=64), "pair"),
    "clip_vision_model": Inhabitant("CLIPVisionConfig", _VISION, "pixels", cache=False),
    "siglip_vision_model": Inhabitant("SiglipVisionConfig", _VISION, "pixels", cache=False),
    "dinov2": Inhabitant("Dinov2Config", dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                              image_size=28, patch_size=7, **_STILL), "pixels", cache=False, side=28),
    "swin": Inhabitant("SwinConfig", dict(image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                                          window_size=4, drop_path_rate=0.0, **_STILL), "pixels", cache=False,
                       attention=("eager",)),
    "sam_vision_model": Inhabitant("SamVisionConfig", dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=64, patch_size=8, window_size=4,
        global_attn_indexes=[1], output_channels=16, mlp_dim=32), "pixels", cache=False, side=64),
    "wav2vec2": Inhabitant("Wav2Vec2Config", dict(
        **_SMALL, conv_dim=[16, 16], conv_stride=[5, 4], conv_kernel=[10, 4], num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, attention_dropout=0.0, hidden_dropout=0.0,
        activation_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0, apply_spec_augment=False), "wave", cache=False),
}
