#!/usr/bin/env python3
"""The training step of `disagmoe bench train` in PyTorch: the same model, batch and optimizer on as many CPU threads.

    train_pytorch.py MODEL.json --seq-len 512 --sequences 4 --threads 2 --steps 5 [--disagmoe "COMMAND"]

MODEL.json is a model manifest of this suite: softmax or top-k routing, QK-norm, SwiGLU experts; no sinks, windows, shared
experts or biases. Prints one JSON line {"seconds", "loss", "torch", "threads"}: the fastest step, as everything else on
the machine can only slow one down. With --disagmoe it first runs that command, which must print a JSON line with
"seconds", and adds "ratio", PyTorch's seconds by the command's: above 1 the command is faster.

The model is written for speed as a PyTorch user would: fused attention, one matrix for q, k and v and for gate and up,
tokens sorted by expert once, no Python loop but the one over experts, fused AdamW where there is one.
"""
import argparse
import json
import math
import subprocess
import time

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, m):
        super().__init__()
        a = m["attention"]
        self.heads, self.kv, self.dim = a["heads"], a["kv_heads"], a["head_dim"]
        self.qkv = nn.Linear(m["hidden"], (self.heads + 2 * self.kv) * self.dim, bias=False)
        self.out = nn.Linear(self.heads * self.dim, m["hidden"], bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(self.dim, m["norm_eps"]) for _ in range(2 if a.get("qk_norm") else 0))

    def forward(self, x, cosine, sine):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, -1, self.dim).split([self.heads, self.kv, self.kv], 2)
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)
        q, k = (t * cosine + torch.cat([-t[..., self.dim // 2:], t[..., :self.dim // 2]], -1) * sine for t in (q, k))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True,
                                           enable_gqa=self.kv != self.heads)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class MoE(nn.Module):
    def __init__(self, m):
        super().__init__()
        e = m["moe"]
        self.experts, self.top_k, inner, hidden = e["experts"], e["top_k"], e["expert_hidden"], m["hidden"]
        self.chosen_only = e["router"] == "topk_softmax" or e.get("renormalise", False)
        self.gate = nn.Linear(hidden, self.experts, bias=False)
        self.gate_up = nn.ParameterList(torch.empty(2 * inner, hidden) for _ in range(self.experts))
        self.down = nn.ParameterList(torch.empty(hidden, inner) for _ in range(self.experts))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        logits = self.gate(flat)
        p = logits.softmax(-1)
        weights, ids = p.topk(self.top_k, dim=-1)
        if self.chosen_only:
            weights = weights / weights.sum(-1, keepdim=True)
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=self.experts)
        rows = flat[order // self.top_k].split(counts.tolist())
        out = []
        for e, r in enumerate(rows):
            gate, up = F.linear(r, self.gate_up[e]).chunk(2, -1)
            out.append(F.linear(F.silu(gate) * up, self.down[e]))
        out = torch.cat(out) * weights.flatten()[order, None]
        y = torch.zeros_like(flat).index_add(0, order // self.top_k, out)
        length = x.shape[1]
        fractions = F.one_hot(ids, self.experts).sum(1).view(-1, length, self.experts).float().mean(1)
        aux = self.experts * (fractions * p.view(-1, length, self.experts).mean(1)).sum(-1).mean()
        return y.view_as(x), aux, logits.logsumexp(-1).square().mean()


class Model(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.m = m
        layers = range(m["layers"])
        self.embed = nn.Embedding(m["vocab"], m["hidden"])
        self.norms = nn.ModuleList(nn.RMSNorm(m["hidden"], m["norm_eps"]) for _ in range(2 * m["layers"] + 1))
        self.attention = nn.ModuleList(Attention(m) for _ in layers)
        self.moe = nn.ModuleList(MoE(m) for _ in layers)
        self.head = nn.Linear(m["hidden"], m["vocab"], bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):
        a, e = self.m["attention"], self.m["moe"]
        angle = torch.arange(ids.shape[1])[:, None] * a["rope_theta"] ** (-torch.arange(0, a["head_dim"], 2) / a["head_dim"])
        angle = torch.cat([angle, angle], -1)[:, None]
        cosine, sine = angle.cos(), angle.sin()
        x, aux, z = self.embed(ids), 0, 0
        for i, (attention, moe) in enumerate(zip(self.attention, self.moe)):
            x = x + attention(self.norms[2 * i](x), cosine, sine)
            y, layer_aux, layer_z = moe(self.norms[2 * i + 1](x))
            x, aux, z = x + y, aux + layer_aux / len(self.moe), z + layer_z / len(self.moe)
        loss = F.cross_entropy(self.head(self.norms[-1](x)).flatten(0, 1), targets.flatten())
        return loss + e.get("aux_loss", 0) * aux + e.get("z_loss", 0) * z


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in ("seq-len", 512), ("sequences", 4), ("threads", 2), ("steps", 5):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--disagmoe", help="command that prints a JSON line with its seconds a step")
    args = parser.parse_args()
    theirs = None
    if args.disagmoe:
        out = subprocess.run(args.disagmoe, shell=True, check=True, capture_output=True, text=True).stdout
        theirs = json.loads(out.strip().splitlines()[-1])["seconds"]
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with open(args.model) as file:
        m = json.load(file)
    model = Model(m)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    best, loss = math.inf, None
    for _ in range(args.steps + 1):  # the first one warms up
        tokens = torch.randint(0, m["vocab"], (args.sequences, args.seq_len + 1))
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        best = min(best, time.perf_counter() - start)
    record = {"seconds": best, "loss": loss.item(), "torch": torch.__version__, "threads": args.threads}
    if theirs:
        record |= {"disagmoe_seconds": theirs, "ratio": best / theirs}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
