"""Families of models that ``compatibility.py`` tries, the most used ones first.

A row names a class of transformers and what its configuration needs beside ``small_models.SMALL``.
"""

from __future__ import annotations

from typing import Any

from small_models import Row

_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
_SMALL_CONVS: dict[str, Any] = {
    "conv_dim": (16, 16),
    "conv_kernel": (20, 16),
    "conv_stride": (20, 16),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "ctc_zero_infinity": True,
}
_CLIP: dict[str, Any] = {
    "text_config": {"eos_token_id": 73},
    "vision_config": {"num_hidden_layers": 2},
}

_LLAVA: dict[str, Any] = {
    "image_seq_length": 16,
    "text_config": {"model_type": "llama"},
    "vision_config": {"model_type": "clip_vision_model"},
}
_PALIGEMMA: dict[str, Any] = {
    "text_config": {"model_type": "gemma"},
    "vision_config": {"model_type": "siglip_vision_model"},
}

_FAMILIES = {
    # Decoders
    "llama": Row("LlamaForCausalLM"),
    "qwen2": Row("Qwen2ForCausalLM"),
    "qwen3": Row("Qwen3ForCausalLM"),
    "mistral": Row("MistralForCausalLM"),
    "gemma2": Row("Gemma2ForCausalLM"),
    "gemma3": Row("Gemma3ForCausalLM"),
    "gpt2": Row("GPT2LMHeadModel"),
    "phi3": Row("Phi3ForCausalLM"),
    # Encoders
    "bert": Row("BertForMaskedLM"),
    "roberta": Row("RobertaForMaskedLM"),
    "distilbert": Row("DistilBertForMaskedLM"),
    "deberta-v2": Row("DebertaV2ForMaskedLM"),
    "modernbert": Row("ModernBertForMaskedLM"),
    "electra": Row("ElectraForMaskedLM"),
    "xlm-roberta": Row("XLMRobertaForSequenceClassification"),
    "bert-classifier": Row("BertForSequenceClassification"),
    "bert-choices": Row("BertForMultipleChoice"),
    # Encoder-decoders
    "t5": Row("T5ForConditionalGeneration"),
    "bart": Row("BartForConditionalGeneration"),
    "whisper": Row("WhisperForConditionalGeneration", batch="transcribed_features"),
    "mt5": Row("MT5ForConditionalGeneration"),
    "pegasus": Row("PegasusForConditionalGeneration"),
    "marian": Row("MarianMTModel", {"decoder_vocab_size": 96}),
    "mbart": Row("MBartForConditionalGeneration"),
    # Vision
    "vit": Row("ViTForImageClassification"),
    "dinov2": Row("Dinov2ForImageClassification"),
    "clip": Row("CLIPModel", _CLIP, batch="contrast"),
    "siglip": Row("SiglipModel", {}, batch="contrast"),
    "beit": Row("BeitForImageClassification"),
    "deit": Row("DeiTForImageClassification"),
    "swin": Row(
        "SwinForImageClassification",
        {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "patch_size": 4},
    ),
    "vit-mae": Row(
        "ViTMAEForPreTraining",
        {"decoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "decoder_intermediate_size": 40}
        | {"decoder_num_attention_heads": 4},
        batch="masked_patches",
    ),
    # Audio
    "wav2vec2": Row("Wav2Vec2ForCTC", _SMALL_CONVS),
    "hubert": Row("HubertForCTC", _SMALL_CONVS),
    "whisper-encoder": Row("WhisperForAudioClassification"),
    # Vision and language
    "llava": Row("LlavaForConditionalGeneration", _LLAVA, "image_text"),
    # Mixtures of experts, state spaces
    "mixtral": Row("MixtralForCausalLM"),
    "deepseek-v3": Row("DeepseekV3ForCausalLM", {"num_key_value_heads": 4}),
    "deepseek-v2": Row(
        "DeepseekV2ForCausalLM",
        {"num_key_value_heads": 4, "num_experts_per_tok": 2, "n_routed_experts": 4},
    ),
    "qwen3-moe": Row("Qwen3MoeForCausalLM"),
    "gpt-oss": Row("GptOssForCausalLM"),
    "mamba": Row("MambaForCausalLM"),
    "mamba2": Row("Mamba2ForCausalLM", {"num_heads": 8, "n_groups": 2, "chunk_size": 8}),
    "qwen3-next": Row("Qwen3NextForCausalLM"),
    "gemma3n": Row(
        "Gemma3nForCausalLM",
        {"vocab_size_per_layer_input": 96, "laurel_rank": 8, "num_kv_shared_layers": 0}
        | {"activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": 40},
    ),
    # More decoders
    "gemma": Row("GemmaForCausalLM"),
    "opt": Row("OPTForCausalLM"),
    "gpt-neox": Row("GPTNeoXForCausalLM"),
    "gpt-neo": Row("GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]]}),
    "gptj": Row("GPTJForCausalLM", {"rotary_dim": 8}),
    "gpt-bigcode": Row("GPTBigCodeForCausalLM"),
    "codegen": Row("CodeGenForCausalLM", {"rotary_dim": 8}),
    "openai-gpt": Row("OpenAIGPTLMHeadModel"),
    "bloom": Row("BloomForCausalLM"),
    "mpt": Row("MptForCausalLM"),
    "falcon": Row("FalconForCausalLM"),
    "phi": Row("PhiForCausalLM"),
    "phimoe": Row("PhimoeForCausalLM"),
    "stablelm": Row("StableLmForCausalLM"),
    "starcoder2": Row("Starcoder2ForCausalLM"),
    "olmo": Row("OlmoForCausalLM"),
    "olmo2": Row("Olmo2ForCausalLM"),
    "olmo3": Row("Olmo3ForCausalLM"),
    "olmoe": Row("OlmoeForCausalLM"),
    "granite": Row("GraniteForCausalLM"),
    "granite-moe": Row("GraniteMoeForCausalLM"),
    "glm": Row("GlmForCausalLM"),
    "glm4": Row("Glm4ForCausalLM"),
    "glm4-moe": Row("Glm4MoeForCausalLM"),
    "cohere": Row("CohereForCausalLM"),
    "cohere2": Row("Cohere2ForCausalLM"),
    "smollm3": Row("SmolLM3ForCausalLM"),
    "llama4-text": Row("Llama4ForCausalLM"),
    "qwen2-moe": Row("Qwen2MoeForCausalLM"),
    "minicpm3": Row("MiniCPM3ForCausalLM", {"num_key_value_heads": 4}),
    "ernie4.5": Row("Ernie4_5ForCausalLM"),
    "exaone4": Row("Exaone4ForCausalLM"),
    "seed-oss": Row("SeedOssForCausalLM"),
    "hunyuan-dense": Row("HunYuanDenseV1ForCausalLM", {"head_dim": 8, **_ROPE}),
    "nemotron": Row("NemotronForCausalLM", {"num_key_value_heads": 2}),
    "persimmon": Row("PersimmonForCausalLM"),
    "arcee": Row("ArceeForCausalLM"),
    "apertus": Row("ApertusForCausalLM"),
    "bitnet": Row("BitNetForCausalLM"),
    "helium": Row("HeliumForCausalLM"),
    "diffllama": Row("DiffLlamaForCausalLM"),
    "dbrx": Row(
        "DbrxForCausalLM",
        {
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 40, "moe_top_k": 2},
        },
    ),
    "jetmoe": Row("JetMoeForCausalLM"),
    "minimax": Row("MiniMaxForCausalLM"),
    "biogpt": Row("BioGptForCausalLM"),
    "xglm": Row("XGLMForCausalLM"),
    "ctrl": Row("CTRLLMHeadModel", {"dff": 40}),
    "dots1": Row(
        "Dots1ForCausalLM",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    ),
    "lfm2": Row("Lfm2ForCausalLM", {"block_ff_dim": 40}),
    "jamba": Row("JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "bamba": Row("BambaForCausalLM", {"mamba_n_heads": 8, "mamba_d_head": 8}),
    "falcon-mamba": Row("FalconMambaForCausalLM"),
    "rwkv": Row("RwkvForCausalLM"),
    "recurrent-gemma": Row("RecurrentGemmaForCausalLM", {"lru_width": 32}),
    # More encoders
    "albert": Row("AlbertForMaskedLM"),
    "deberta": Row("DebertaForMaskedLM"),
    "camembert": Row("CamembertForMaskedLM"),
    "xlm-roberta-xl": Row("XLMRobertaXLForMaskedLM"),
    "mpnet": Row("MPNetForMaskedLM", {"relative_attention_num_buckets": 32}),
    "longformer": Row("LongformerForMaskedLM", {"attention_window": 8}),
    "big-bird": Row("BigBirdForMaskedLM"),
    "esm": Row("EsmForMaskedLM", {"vocab_size": 96, "pad_token_id": 1, "mask_token_id": 74}),
    "eurobert": Row("EuroBertForMaskedLM"),
    "ernie": Row("ErnieForMaskedLM"),
    "rembert": Row("RemBertForMaskedLM"),
    "roformer": Row("RoFormerForMaskedLM"),
    "mobilebert": Row("MobileBertForMaskedLM"),
    "squeezebert": Row("SqueezeBertForMaskedLM"),
    "fnet": Row("FNetForMaskedLM"),
    "funnel": Row("FunnelForMaskedLM", {"block_sizes": [1, 1], "d_head": 8, "d_inner": 40}),
    "convbert": Row("ConvBertForMaskedLM"),
    "ibert": Row("IBertForMaskedLM"),
    "nystromformer": Row(
        "NystromformerForMaskedLM",
        {"num_landmarks": 16, "segment_means_seq_len": 16},
        lengths=(16,) * 3,
    ),
    "xlnet": Row("XLNetLMHeadModel", {"d_inner": 40}),
    "xlm": Row("XLMWithLMHeadModel"),
    "megatron-bert": Row("MegatronBertForMaskedLM"),
    "nomic-bert": Row("NomicBertForMaskedLM"),
    "llama-classifier": Row("LlamaForSequenceClassification"),
    # More encoder-decoders
    "m2m100": Row("M2M100ForConditionalGeneration"),
    "blenderbot": Row("BlenderbotForConditionalGeneration"),
    "led": Row("LEDForConditionalGeneration", {"attention_window": 8}),
    "longt5": Row("LongT5ForConditionalGeneration", {"local_radius": 3}),
    "umt5": Row("UMT5ForConditionalGeneration"),
    "switch": Row(
        "SwitchTransformersForConditionalGeneration",
        {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    ),
    "prophetnet": Row("ProphetNetForConditionalGeneration"),
    # More of vision, audio, and both with language
    "data2vec-vision": Row("Data2VecVisionForImageClassification"),
    "dinov2-registers": Row("Dinov2WithRegistersForImageClassification"),
    "ijepa": Row("IJepaForImageClassification"),
    "vit-msn": Row("ViTMSNForImageClassification"),
    "resnet": Row(
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    ),
    "convnext": Row(
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [1, 1], "patch_size": 4, "num_stages": 2},
    ),
    "segformer": Row(
        "SegformerForImageClassification",
        {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
        | {"num_attention_heads": [1, 2, 2, 2], "decoder_hidden_size": 16},
    ),
    "ast": Row("ASTForAudioClassification", {"max_length": 40}, batch="spectrogram"),
    "wavlm": Row("WavLMForCTC", _SMALL_CONVS),
    "data2vec-audio": Row("Data2VecAudioForCTC", _SMALL_CONVS),
    "wav2vec2-classifier": Row("Wav2Vec2ForSequenceClassification", _SMALL_CONVS, batch="waves"),
    "paligemma": Row("PaliGemmaForConditionalGeneration", _PALIGEMMA, "image_text"),
    "llava-next": Row("LlavaNextForConditionalGeneration", _LLAVA, "image_text"),
    "qwen2-vl-text": Row("Qwen2VLForConditionalGeneration", {"text_config": _MROPE}, "tokens"),
    "mllama-text": Row("MllamaForCausalLM", {"cross_attention_layers": [1]}),
    "blip": Row("BlipForConditionalGeneration", {}, "contrast"),
}

FAMILIES: dict[str, Row] = _FAMILIES
"""Name -> its row."""
