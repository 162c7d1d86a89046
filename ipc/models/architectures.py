"""The architectures that tests cover, by name, and what each does. Imports no transformers.

A test holds these lists against the models that tests build.
"""

from __future__ import annotations

_GENERATE = """
AXK1ForCausalLM AXK2ForCausalLM AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM BailingHybridForCausalLM
BambaForCausalLM BeamForCausalLM BioGptForCausalLM BitNetForCausalLM BloomForCausalLM CTRLLMHeadModel
CodeGenForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM CohereCompassForCausalLM CohereForCausalLM
CwmForCausalLM Data2VecTextForCausalLM DbrxForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
DeepseekV3ForCausalLM DiffLlamaForCausalLM DogeForCausalLM Dots1ForCausalLM Dots3NoteForCausalLM Ernie4_5ForCausalLM
Ernie4_5_MoeForCausalLM Exaone4ForCausalLM FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM
FlexOlmoForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoForCausalLM GPTNeoXForCausalLM
Gemma2ForCausalLM Gemma3ForCausalLM Gemma4ForCausalLM Gemma4UnifiedForCausalLM GemmaForCausalLM Glm4ForCausalLM
Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmForCausalLM GlmMoeDsaForCausalLM GptOssForCausalLM GraniteForCausalLM
GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM
GraniteSWAForCausalLM HYV4ForCausalLM HeliumForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM
HyperCLOVAXForCausalLM Jais2ForCausalLM JambaForCausalLM KimiLinearForCausalLM Kolibri1ForCausalLM LagunaForCausalLM
Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm3ForCausalLM Llama4ForCausalLM LlamaForCausalLM Mamba2ForCausalLM
MambaForCausalLM MiMoV2FlashForCausalLM MiniCPM3ForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM
MiniMaxM3VLForCausalLM Ministral3ForCausalLM MinistralForCausalLM MistralForCausalLM MixtralForCausalLM
ModernBertDecoderForCausalLM MptForCausalLM NanoChatForCausalLM NemotronForCausalLM NemotronHForCausalLM
OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM
PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM PhimoeForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM
Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM
RecurrentGemmaForCausalLM RobertaForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM StableLmForCausalLM
Starcoder2ForCausalLM VaultGemmaForCausalLM YoutuForCausalLM Zamba2ForCausalLM ZambaForCausalLM ZayaForCausalLM
"""
GENERATE = frozenset(_GENERATE.split())
"""Language models of transformers: they generate, and embed with `convert="embed"`."""

_EMBED = """
AXK1Model AXK2Model AfmoeModel AlbertModel ApertusModel ArceeModel BailingHybridModel BambaModel BeamModel BertModel
BioGptModel BitNetModel BloomModel CTRLModel CamembertModel CodeGenModel Cohere2Model Cohere2MoeModel
CohereCompassTextModel CohereModel ConvBertModel CwmModel Data2VecTextModel DbrxModel DebertaV2Model DeepseekV2Model
DeepseekV32Model DeepseekV3Model DiffLlamaModel DistilBertModel DogeModel Dots1Model Dots3NoteTextModel ElectraModel
Ernie4_5Model Ernie4_5_MoeModel ErnieModel EuroBertModel Exaone4Model FalconH1Model FalconMambaModel FalconModel
FlexOlmoModel GPT2Model GPTBigCodeModel GPTJModel GPTNeoModel GPTNeoXModel Gemma2Model Gemma3TextModel
Gemma4TextModel Gemma4UnifiedTextModel GemmaModel Glm4Model Glm4MoeLiteModel Glm4MoeModel GlmModel GlmMoeDsaModel
GptOssModel GraniteModel GraniteMoeHybridModel GraniteMoeModel GraniteMoeSWAModel GraniteMoeSharedModel
GraniteSWAModel GteModel HYV4Model HeliumModel HunYuanDenseV1Model HunYuanMoEV1Model HyperCLOVAXModel Jais2Model
JambaModel JinaEmbeddingsV3Model KimiLinearModel Kolibri1Model LagunaModel Lfm2Model Lfm2MoeModel Lfm3Model
Llama4TextModel LlamaModel MPNetModel Mamba2Model MambaModel MegatronBertModel MiMoV2FlashModel MiniCPM3Model
MiniMaxM2Model MiniMaxM3VLTextModel MiniMaxModel Ministral3Model MinistralModel MistralModel MixtralModel
ModernBertDecoderModel ModernBertModel MptModel NanoChatModel NemotronHModel NemotronModel NomicBertModel OPTModel
Olmo2Model Olmo3Model OlmoHybridModel OlmoModel OlmoeModel PersimmonModel Phi3Model PhiModel PhimoeModel Qwen2Model
Qwen2MoeModel Qwen3Model Qwen3MoeModel Qwen3NextModel Qwen3_5MoeTextModel Qwen3_5TextModel RecurrentGemmaModel
RemBertModel RobertaModel RobertaPreLayerNormModel SeedOssModel SmolLM3Model StableLmModel Starcoder2Model
VaultGemmaModel XLMRobertaModel XLMRobertaXLModel YoutuModel Zamba2Model ZambaModel ZayaModel
"""
EMBED = frozenset(_EMBED.split())
"""Base models of transformers, which embed. Those of language models, and encoders."""

_MULTIMODAL = """
AudioFlamingo3ForConditionalGeneration AyaVisionForConditionalGeneration Gemma3ForConditionalGeneration
Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration GlmAsrForConditionalGeneration
Idefics3ForConditionalGeneration InternVLForConditionalGeneration LlavaForConditionalGeneration
LlavaNextForConditionalGeneration Mistral3ForConditionalGeneration Qwen2AudioForConditionalGeneration
Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration
Qwen3VLMoeForConditionalGeneration SmolVLMForConditionalGeneration WhisperForConditionalGeneration
"""
MULTIMODAL = frozenset(_MULTIMODAL.split())
"""Models that generate, and take pictures or sounds."""

_ENCODER_DECODERS = """
BartForConditionalGeneration BlenderbotForConditionalGeneration BlenderbotSmallForConditionalGeneration
M2M100ForConditionalGeneration MBartForConditionalGeneration MT5ForConditionalGeneration MarianMTModel
PLBartForConditionalGeneration PegasusForConditionalGeneration T5ForConditionalGeneration
UMT5ForConditionalGeneration
"""
ENCODER_DECODERS = frozenset(_ENCODER_DECODERS.split())
"""Encoder-decoders of texts, which generate."""

REWARD = frozenset({"Qwen2ForProcessRewardModel", "Qwen2ForRewardModel"})
"""Models that give tokens or steps a reward."""

KINDS = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
    "ForCausalLM": "embed",
    "ForMaskedLM": "embed",
    "ForPreTraining": "embed",
    "EmbeddingModel": "embed",
    "Model": "embed",
}
"""What a model pools to, by the end of its architecture's name."""


def kind_of(architecture: str) -> str | None:
    """The task for which such a model pools: "embed", "classify", "token_classify"; None: it does not pool."""
    if architecture.endswith("RewardModel"):
        return None
    return next((kind for end, kind in KINDS.items() if architecture.endswith(end)), None)


def pools(architecture: str) -> bool:
    """True if a model of this architecture pools where no option says so."""
    if architecture in REWARD:
        return True
    generates = architecture.endswith("ForCausalLM") or "LMHead" in architecture
    return not generates and architecture not in ENCODER_DECODERS and kind_of(architecture) is not None


def has_base(architecture: str) -> bool:
    """True for an architecture that is one of `EMBED` with another head."""
    ends = (end for end in KINDS if architecture.endswith(end))
    return any(f"{architecture.removesuffix(end)}Model" in EMBED for end in ends)
