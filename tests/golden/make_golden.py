#!/usr/bin/env python3
"""Golden values for the training step, made by other people's software.

    python3 -m venv venv && venv/bin/pip install torch transformers safetensors
    venv/bin/python tests/golden/make_golden.py

Writes one folder a case with
  config.json           the configuration as HuggingFace has it
  model.safetensors     weights under the names checkpoints use; or shards with an index and the configuration, as
                        transformers itself (5.24.0 for what is here) saves them
  expected.safetensors  tokens (sequences, S + 1), logits, loss (cross-entropy + aux_coefficient * aux), aux, and
                        grad.NAME of every parameter, experts one by one as (out, in) matrices

Qwen3-MoE, GPT-OSS and Mixtral are transformers' own classes. DeepSeek-MoE is not part of transformers; the model below is
written after its published configuration (first layer dense, shared experts, softmax before top-k, weights not
renormalised). The auxiliary loss is transformers' load_balancing_loss_func, applied per sequence and MoE layer and
averaged. Expected values are computed in float64: the classes' casts to float32 are redirected, since the float64
build is compared more tightly than float32 could tell. Cases are drawn anew until no token's choice of experts hangs
on a difference that float32 could flip.
"""
import json
import pathlib
import random

import torch
from torch import nn
from torch.nn import functional as F
from safetensors.torch import save_file
from transformers import (GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig,
                          Qwen3MoeForCausalLM)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

HERE = pathlib.Path(__file__).resolve().parent
SEQUENCES, SMALLEST_MARGIN = 2, 2e-3

# Cases that transformers saves, in shards of at most so much.
SAVED, SHARD = ("mixtral-1", "mixtral-2", "qwen3-4", "gptoss-4"), "12KB"
CLASSES = {"qwen3": (Qwen3MoeForCausalLM, Qwen3MoeConfig), "gptoss": (GptOssForCausalLM, GptOssConfig),
           "mixtral": (MixtralForCausalLM, MixtralConfig)}
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# From here on "float32" inside the classes means float64.
torch.set_default_dtype(torch.float64)
torch.float32 = torch.float = torch.float64
torch.Tensor.float = torch.Tensor.double


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class SwiGLU(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DeepseekAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.dim = c["num_attention_heads"], c["hidden_size"] // c["num_attention_heads"]
        for name in "q_proj", "k_proj", "v_proj", "o_proj":
            setattr(self, name, nn.Linear(c["hidden_size"], c["hidden_size"], bias=False))
        frequency = c["rope_theta"] ** (-torch.arange(0, self.dim, 2) / self.dim)
        self.frequency = torch.cat([frequency, frequency]).double()

    def rotate(self, x):
        angle = torch.arange(x.shape[2])[:, None] * self.frequency
        half = self.dim // 2
        return x * angle.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angle.sin()

    def forward(self, x):
        batch, length, hidden = x.shape
        q, k, v = (p(x).view(batch, length, self.heads, self.dim).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = self.rotate(q) @ self.rotate(k).transpose(2, 3) / self.dim**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, hidden))


class DeepseekMoE(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.top_k, inner = c["num_experts_per_tok"], c["moe_intermediate_size"]
        self.gate = nn.Linear(c["hidden_size"], c["n_routed_experts"], bias=False)
        self.experts = nn.ModuleList(SwiGLU(c["hidden_size"], inner) for _ in range(c["n_routed_experts"]))
        self.shared_experts = SwiGLU(c["hidden_size"], inner * c["n_shared_experts"])

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        self.logits = self.gate(flat)
        weights, chosen = self.logits.softmax(-1).topk(self.top_k, dim=-1)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            y = y.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return (y + self.shared_experts(flat)).view_as(x)


class DeepseekLayer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.self_attn = DeepseekAttention(c)
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        dense = index < c["first_k_dense_replace"]
        self.mlp = SwiGLU(c["hidden_size"], c["intermediate_size"]) if dense else DeepseekMoE(c)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Deepseek(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.model.layers = nn.ModuleList(DeepseekLayer(c, i) for i in range(c["num_hidden_layers"]))
        self.model.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.lm_head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)

    def forward(self, ids):
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        moe = [layer.mlp.logits for layer in self.model.layers if hasattr(layer.mlp, "logits")]
        return self.lm_head(self.model.norm(x)), moe


def transformers_model(kind, config_class, config, **more):
    model = kind(config_class(**config, **more, attn_implementation="eager"))
    model.set_experts_implementation("eager")
    return model.double()


def run_transformers(model, ids):
    out = model(ids, output_router_logits=True, use_cache=False)
    return out.logits, list(out.router_logits)


def configuration(family, number, draw):
    heads, kv = draw.choice([(4, 2), (6, 3), (4, 4), (3, 1)])
    dim = draw.choice([4, 6, 8])
    experts = draw.choice([4, 5, 7])
    common = {"vocab_size": draw.choice([37, 53]), "hidden_size": draw.choice([18, 24]), "num_hidden_layers": 2,
              "num_attention_heads": heads, "num_experts_per_tok": draw.choice([2, 3]), "hidden_act": "silu",
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": (family, number) == ("qwen3", 4)}
    inner = draw.choice([9, 14])
    if family == "qwen3":
        return common | {"model_type": "qwen3_moe", "num_key_value_heads": kv, "head_dim": dim, "num_experts": experts,
                         "moe_intermediate_size": inner, "norm_topk_prob": draw.random() < 0.7,
                         "router_aux_loss_coef": 0.01, "attention_bias": False, "decoder_sparse_step": 1,
                         "mlp_only_layers": [], "use_sliding_window": False}
    if family == "gptoss":
        return common | {"model_type": "gpt_oss", "num_key_value_heads": kv, "head_dim": dim,
                         "num_local_experts": experts, "intermediate_size": inner, "router_aux_loss_coef": 0.01,
                         "attention_bias": True, "sliding_window": draw.choice([4, 5]), "swiglu_limit": 7.0,
                         "layer_types": ["sliding_attention", "full_attention"],
                         "rope_scaling": {"rope_type": "default"}}
    if family == "mixtral":
        return common | {"model_type": "mixtral", "num_key_value_heads": kv, "head_dim": dim,
                         "num_local_experts": experts, "intermediate_size": inner, "router_aux_loss_coef": 0.01,
                         "sliding_window": draw.choice([4, 5])}
    heads, dim = draw.choice([(3, 6), (2, 8)])
    return common | {"model_type": "deepseek", "hidden_size": heads * dim, "num_attention_heads": heads,
                     "num_key_value_heads": heads,
                     "num_hidden_layers": 3, "n_routed_experts": experts, "n_shared_experts": draw.choice([1, 2]),
                     "moe_intermediate_size": inner, "first_k_dense_replace": 1, "intermediate_size": 20,
                     "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax", "aux_loss_alpha": 0.01}


def build(family, config):
    if family == "deepseek":
        model = Deepseek(config)
        return model, lambda ids: model(ids)
    more = {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}}
    plain = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling", "model_type")}
    model = transformers_model(*CLASSES[family], plain, **more)
    return model, lambda ids: run_transformers(model, ids)


def one_by_one(name, tensor, family):
    """Packed expert tensors as (out, in) matrices of single experts; the rest as they are."""
    if family == "deepseek" or ".mlp.experts." not in name:
        yield name.replace(".mlp.router.", ".mlp.gate."), tensor
        return
    head, bias = name.rsplit(".", 1)[0], "bias" if name.endswith("_bias") else "weight"
    for e, t in enumerate(tensor):
        if family == "gptoss" and bias == "weight":
            t = t.T
        if "gate_up" not in name:
            yield f"{head}.{e}.down_proj.{bias}", t
        elif family == "gptoss":
            yield f"{head}.{e}.gate_proj.{bias}", t[0::2]
            yield f"{head}.{e}.up_proj.{bias}", t[1::2]
        else:
            gate, up = t.chunk(2)
            yield f"{head}.{e}.gate_proj.{bias}", gate
            yield f"{head}.{e}.up_proj.{bias}", up


def stored_weights(model, family):
    """As checkpoints have them: GPT-OSS packed, the others expert by expert."""
    for name, tensor in model.named_parameters():
        if family == "gptoss":
            yield name, tensor
        else:
            yield from one_by_one(name, tensor, family)


def margin(logits, top_k):
    smallest = float("inf")
    for layer in logits:
        values = layer.sort(dim=-1, descending=True).values
        smallest = min(smallest, (values[:, top_k - 1] - values[:, top_k]).min().item())
    return smallest


def write(folder, config, family, model, expected, stored):
    path = HERE / folder
    path.mkdir(exist_ok=True)
    save_file({n: t.detach().double().contiguous() for n, t in expected.items()}, path / "expected.safetensors")
    if folder in SAVED:
        model.to(STORED[stored]).save_pretrained(path, max_shard_size=SHARD)
        (path / "generation_config.json").unlink()
    else:
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_file({n: t.detach().to(STORED[stored]).contiguous() for n, t in stored_weights(model, family)},
                  path / "model.safetensors", {"format": "pt"})


def case(family, number, stored):
    seed = number * 1000
    while True:
        draw = random.Random(f"{family} {seed}")
        torch.manual_seed(seed)
        seed += 1
        config, length = configuration(family, number, draw), draw.choice([11, 15])
        model, run = build(family, config)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(torch.randn(p.shape) * (0.1 if "norm" in name else 0.35) + ("norm" in name))
                p.copy_(p.to(STORED[stored]).double())
        tokens = torch.randint(0, config["vocab_size"], (SEQUENCES, length + 1))
        logits, router = run(tokens[:, :-1])
        if margin(router, config["num_experts_per_tok"]) > SMALLEST_MARGIN:
            break
    loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
    sequences = [(layer.view(SEQUENCES, length, -1)[s],) for layer in router for s in range(SEQUENCES)]
    aux = torch.stack([load_balancing_loss_func(s, s[0].shape[-1], config["num_experts_per_tok"])
                       for s in sequences]).mean()
    loss = loss + 0.01 * aux
    loss.backward()
    expected = {"tokens": tokens, "logits": logits, "loss": loss.reshape(1), "aux": aux.reshape(1)}
    for name, p in model.named_parameters():
        for n, g in one_by_one(name, p.grad, family):
            expected["grad." + n] = g
    write(f"{family}-{number}", config, family, model, expected, stored)
    print(family, number, "seed", seed - 1, "loss", loss.item())


if __name__ == "__main__":
    for family in "qwen3", "gptoss", "deepseek":
        case(family, 1, "float32")
        case(family, 2, "bfloat16")
        case(family, 3, "float16")
    case("qwen3", 4, "float32")
    case("gptoss", 4, "bfloat16")
    case("mixtral", 1, "float32")
    case("mixtral", 2, "bfloat16")
