"""FoX in the library transformers (5 and later): ``import acp_repro.hf`` registers config, model, tokenizer.

    import acp_repro.hf
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("pretrained/pro-13m-4k-acp")
    tokenizer = AutoTokenizer.from_pretrained("pretrained/pro-13m-4k-acp")  # prepends BOS

Folders of this project and the authors' checkpoints contain the same tensors under the same names. Both load
without conversion, by path or by Hub name. No code from a checkpoint is executed.
"""

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise ImportError(
        "acp_repro.hf needs transformers 5 or later: `pip install '.[transformers]'` in the clone"
    ) from error

from .attention_interface import register_attention
from .configuration import ForgettingTransformerCache, ForgettingTransformerConfig
from .modeling import ForgettingTransformerForCausalLM, ForgettingTransformerModel
from .tokenization import FoXTokenizer, JSONGPT2Tokenizer

AutoConfig.register(ForgettingTransformerConfig.model_type, ForgettingTransformerConfig, exist_ok=True)
AutoModel.register(ForgettingTransformerConfig, ForgettingTransformerModel, exist_ok=True)
AutoModelForCausalLM.register(ForgettingTransformerConfig, ForgettingTransformerForCausalLM, exist_ok=True)
# Trainer, the pipelines and lm-eval look up names in these mappings, which `register` does not update.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[ForgettingTransformerConfig.model_type] = (
    ForgettingTransformerForCausalLM.__name__
)
# tokenizer_config.json may name either class. The last one is the default for folders that name none.
for _tokenizer in (JSONGPT2Tokenizer, FoXTokenizer):
    AutoTokenizer.register(ForgettingTransformerConfig, tokenizer_class=_tokenizer, exist_ok=True)

__all__ = [
    "FoXTokenizer",
    "ForgettingTransformerCache",
    "ForgettingTransformerConfig",
    "ForgettingTransformerForCausalLM",
    "ForgettingTransformerModel",
    "JSONGPT2Tokenizer",
    "register_attention",
]
