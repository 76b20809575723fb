"""A model that transformers does not know: the custom code of the tiny "remote-code" model.

Never imported from here: tiny.py copies this file into the model folder; transformers loads it from
there with ``trust_remote_code=True``. The design is its own on purpose (fused qkv, attention
and MLP in parallel, squared ReLU, unusual module names), so that nothing may rely on Llama's names.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class TinyRemoteConfig(PretrainedConfig):
    model_type = "tiny_remote"

    def __init__(
        self,
        vocab_size: int = 512,
        hidden_size: int = 64,
        intermediate_size: int = 192,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 4,
        max_position_embeddings: int = 512,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)


class Scale(nn.Module):
    """RMS normalisation in float32, as in Llama."""

    def __init__(self, hidden: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.gain * wide.to(x.dtype)


class Mixer(nn.Module):
    def __init__(self, config: TinyRemoteConfig, index: int):
        super().__init__()
        self.index = index
        self.num_heads = config.num_attention_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, allowed, cache):
        B, T, D = x.shape
        # (B, T, 3D) -> 3 x (B, N, T, H)
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


class Brick(nn.Module):
    def __init__(self, config: TinyRemoteConfig, index: int):
        super().__init__()
        self.scale = Scale(config.hidden_size)
        self.mixer = Mixer(config, index)
        self.widen = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.narrow = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x, allowed, cache):
        y = self.scale(x)
        return x + self.mixer(y, allowed, cache) + self.narrow(F.relu(self.widen(y)).square())


class TinyRemoteForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TinyRemoteConfig
    _no_split_modules = ("Brick",)
    _supports_sdpa = True

    def __init__(self, config: TinyRemoteConfig):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.bricks = nn.ModuleList(Brick(config, i) for i in range(config.num_hidden_layers))
        self.scale = Scale(config.hidden_size)
        self.unembed = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def get_output_embeddings(self):
        return self.unembed

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=None,
        logits_to_keep=0,
        **kwargs,
    ):
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        T = input_ids.shape[1]
        row = torch.arange(past, past + T, device=input_ids.device)
        column = torch.arange(past + T, device=input_ids.device)
        allowed = (column[None, :] <= row[:, None])[None, None]  # (1, 1, T, past + T)
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, : past + T].bool()
            # A padding row sees nothing: let it see itself, or softmax gives nan.
            allowed = allowed | (column[None, :] == row[:, None])[None, None]
        x = self.words(input_ids) + self.places(row if position_ids is None else position_ids)
        for brick in self.bricks:
            x = brick(x, allowed, past_key_values)
        logits = self.unembed(self.scale(x)[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)
