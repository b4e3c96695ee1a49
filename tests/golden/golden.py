#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tiny GlmMoeDsa oracle: seeded random checkpoint in the released layout + golden activations.

usage:  golden.py [--out DIR] [--preset tiny|odd|block] [--dtype float32|bfloat16]
                  [--seed N] [--prompt-len N] [--new N] [--fp8] [--copy FORMAT] [--no-mtp]
                  [--compare]

float32 is the parity oracle.  bfloat16 output is informative only: rounding reorders near-tied
indexer and router scores (transformers' eager and sdpa attention already disagree there).

--compare prints what transformers' other ways give: sdpa attention, generate().

writes  DIR/config.json, generation_config.json, model.safetensors
                                per-expert tensors, MTP layer under model.layers.<layers>.*
        DIR/golden.npz          see KEYS
        DIR/fp8/                (--fp8) block-[128,128] e4m3 copy; golden_fp8.npz is transformers
                                run on the de-quantised weights (activations are not quantised)
        DIR/FORMAT/             (--copy int4, int4-g128, int4-int8 or awq) the same with integers,
                                golden_FORMAT.npz

All norms, the correction bias and all projections are non-degenerate.  index_topk is far below the
sequence length, so the sparse selection changes the logits (the script asserts it).

KEYS of golden.npz (T prompt length, L layers, S = T + new - 1)
  prompt[T]  logits_prefill[T,V]  logits_prefill_dense[T,V] (index_topk >= T)
  hidden_layers[L,T,D] (residual stream after the layer)  topk_mask[L,T,T] bool, causal part
  moe_layers  router_experts[M,T,k] ascending ids  router_weights[M,T,k] (normed * 2.5)
  greedy_tokens[new]  greedy_logits[new,V]  full_logits[S,V] (recomputed without a cache)
  final_hidden[S,D] (after the final norm)  greedy_margin[new]  cache_vs_full_maxabs
  topk_margin_min[L]  smallest kept-vs-dropped index score gap (inf on shared layers)
  router_margin_min[M]  smallest kept-vs-dropped gap of sigmoid + bias
  mtp_hidden_zero{0,1}[S,D]  mtp_logits_zero{0,1}[S,V]  row i = f(E[t_{i+1}], final_hidden[i]);
      zero1 zeroes the embedding at position 0
  mtp_topk_mask[S,S]  mtp_draft_tokens_share{0,1}[5]  mtp_draft_logits_share{0,1}[5,V]
      recurrent drafting from the last row, own index in each pass / the first pass's index
  mtp_draft_margin_share{0,1}[5]  mtp_topk_margin_min  mtp_router_margin_min (all MTP passes)
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from oracle import LAYERS, PRESETS, Mtp, Recorder, fill, hf, make_config

from glmserve.checkpoint.quantiser import FORMATS, quantise
from tests.checkpoint.plain_copies import dequantise_all

VERIFIED = "5.24.0"  # other 5.x releases have a wrong indexer RoPE
DRAFTS = 5
NOT_FP8 = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "weights_proj", "eh_proj")

Arrays = dict[str, np.ndarray[Any, Any]]


def to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().float().cpu().numpy()


def topk_bitmask(indices: Tensor, length: int) -> np.ndarray[Any, Any]:
    """[1, S, k] indices -> bool [S, S]; drops entries that the causal mask kills (j > i)."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    mask.scatter_(1, indices[0].long(), True)
    return (mask & torch.tril(torch.ones(length, length, dtype=torch.bool))).numpy()


def top2_gap(logits: Tensor) -> np.ndarray[Any, Any]:
    best = logits.float().topk(2).values
    return to_numpy(best[..., 0] - best[..., 1])


def prefill_goldens(model: Any, config: GlmMoeDsaConfig, prompt: Tensor) -> Arrays:
    g: Arrays = {"prompt": prompt[0].numpy()}
    length = prompt.shape[1]
    taps = Recorder(list(model.model.layers))
    out = model(input_ids=prompt, use_cache=False)
    taps.close()
    g["logits_prefill"] = to_numpy(out.logits[0])
    g["hidden_layers"] = np.stack([to_numpy(taps.hidden[i][0]) for i in range(LAYERS)])
    g["topk_mask"] = np.stack([topk_bitmask(taps.topk[i], length) for i in range(LAYERS)])
    routed = sorted(taps.routing)
    order = [taps.routing[i][1].sort(-1) for i in routed]
    g["moe_layers"] = np.array(routed)
    g["router_experts"] = np.stack([o.values.numpy() for o in order])
    weights = [taps.routing[i][0].gather(1, o.indices) for i, o in zip(routed, order, strict=True)]
    g["router_weights"] = np.stack([to_numpy(w) for w in weights])
    for i in range(LAYERS):  # shared layers must carry the full layer's set
        if config.indexer_types[i] == "shared":
            assert (g["topk_mask"][i] == g["topk_mask"][i - 1]).all()
    # sparsity must matter: same weights, index_topk >= T
    indexers = [layer.self_attn.indexer for layer in model.model.layers]
    indexers = [indexer for indexer in indexers if indexer is not None]
    for indexer in indexers:
        indexer.index_topk = length
    dense = model(input_ids=prompt, use_cache=False).logits
    for indexer in indexers:
        indexer.index_topk = config.index_topk
    g["logits_prefill_dense"] = to_numpy(dense[0])
    effect = (dense - out.logits).abs().max().item()
    assert effect > 1e-2, f"index_topk does not bite ({effect})"
    return g


def greedy_goldens(model: Any, prompt: Tensor, new: int) -> tuple[Arrays, Tensor, Tensor]:
    """Incremental with a cache, and its full-recompute twin; returns the sequence and hidden."""
    g: Arrays = {}
    length = prompt.shape[1]
    sequence, cache, current, steps = prompt.clone(), None, prompt, []
    for _ in range(new):
        given = {} if cache is None else {"cache": cache}
        out = model(input_ids=current, use_cache=True, **given)
        cache = out.cache
        steps.append(out.logits[0, -1])
        current = out.logits[:, -1].argmax(-1, keepdim=True)
        sequence = torch.cat([sequence, current], 1)
    logits = torch.stack(steps)
    g["greedy_tokens"] = sequence[0, length:].numpy()
    g["greedy_logits"] = to_numpy(logits)
    g["greedy_margin"] = top2_gap(logits)
    taps = Recorder(list(model.model.layers))
    result = model.model(input_ids=sequence[:, :-1], use_cache=False)
    taps.close()
    margins = [taps.index_margin.get(i, np.inf) for i in range(LAYERS)]
    g["topk_margin_min"] = np.array(margins)
    g["router_margin_min"] = np.array([taps.router_margin[i] for i in sorted(taps.router_margin)])
    full = model.lm_head(result.last_hidden_state)
    g["full_logits"] = to_numpy(full[0])
    g["cache_vs_full_maxabs"] = np.array((full[0, length - 1 :] - logits).abs().max().item())
    g["final_hidden"] = to_numpy(result.last_hidden_state[0])
    return g, sequence, result.last_hidden_state


def mtp_goldens(model: Any, mtp: Mtp, sequence: Tensor, hidden: Tensor) -> Arrays:
    g: Arrays = {}
    embed, length = model.model.embed_tokens, sequence.shape[1] - 1
    positions, following = torch.arange(length)[None], embed(sequence[:, 1:])
    taps = Recorder([mtp.block])
    for zero in (False, True):
        y, indices = mtp(following, hidden, positions, zero)
        g[f"mtp_hidden_zero{int(zero)}"] = to_numpy(y[0])
        g[f"mtp_logits_zero{int(zero)}"] = to_numpy(model.lm_head(y)[0])
        if not zero:
            g["mtp_topk_mask"] = topk_bitmask(indices, length)
    for share in (False, True):
        embeddings, states = following.clone(), hidden.clone()
        tokens, logits, kept = [], [], None
        for step in range(DRAFTS):
            at = torch.arange(embeddings.shape[1])[None]
            if share and kept is not None:
                # rows 0..S-1 keep their own index; new rows reuse the last verified row's set
                reused = kept[:, length - 1 : length].expand(-1, step, -1)
                y, _ = mtp(embeddings, states, at, False, topk=torch.cat([kept, reused], 1))
            else:
                y, indices = mtp(embeddings, states, at, False)
                kept = indices if step == 0 else kept
            logits.append(model.lm_head(y[:, -1])[0])
            token = logits[-1].argmax()[None, None]
            tokens.append(token.item())
            embeddings = torch.cat([embeddings, embed(token)], 1)
            states = torch.cat([states, y[:, -1:]], 1)
        name = f"share{int(share)}"
        g[f"mtp_draft_tokens_{name}"] = np.array(tokens)
        g[f"mtp_draft_logits_{name}"] = np.stack([to_numpy(row) for row in logits])
        g[f"mtp_draft_margin_{name}"] = top2_gap(torch.stack(logits))
    taps.close()
    g["mtp_topk_margin_min"] = np.array(taps.index_margin[0])
    g["mtp_router_margin_min"] = np.array(taps.router_margin[0])
    return g


@torch.no_grad()
def goldens(
    model: Any, mtp: Mtp | None, config: GlmMoeDsaConfig, prompt: Tensor, new: int
) -> Arrays:
    model.eval()
    g = prefill_goldens(model, config, prompt)
    more, sequence, hidden = greedy_goldens(model, prompt, new)
    g |= more
    if mtp is not None:
        g |= mtp_goldens(model, mtp, sequence, hidden)
    return g


def fp8_blocks(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(e4m3 weights with their scales, the same de-quantised), blocks of 128 x 128."""
    quantised: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.ndim != 2 or not name.endswith(".weight") or any(s in name for s in NOT_FP8):
            quantised[name] = plain[name] = value
            continue
        rows, columns = value.shape
        tall, wide = -(-rows // 128), -(-columns // 128)
        padded = torch.zeros(tall * 128, wide * 128)
        padded[:rows, :columns] = value.float()
        blocks = padded.view(tall, 128, wide, 128)
        scale = (blocks.abs().amax((1, 3)) / 448.0).clamp_min(1e-12)
        spread = scale[:, None, :, None]
        weight = (blocks / spread).to(torch.float8_e4m3fn)
        quantised[name] = weight.view(padded.shape)[:rows, :columns].contiguous()
        quantised[name + "_scale_inv"] = scale
        back = (weight.float() * spread).view(padded.shape)[:rows, :columns]
        plain[name] = back.to(value.dtype).contiguous()
    return quantised, plain


def margins(g: Arrays) -> str:
    parts = {
        "index": g["topk_margin_min"].min(),
        "router": g["router_margin_min"].min(),
        "greedy": g["greedy_margin"].min(),
    }
    if "mtp_topk_margin_min" in g:
        parts["mtp index"] = g["mtp_topk_margin_min"]
        parts["mtp router"] = g["mtp_router_margin_min"]
        drafts = [g[f"mtp_draft_margin_share{s}"].min() for s in (0, 1)]
        parts["mtp draft"] = min(drafts)
    return "  ".join(f"{name} {float(value):.2e}" for name, value in parts.items())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="golden-out", type=Path)
    parser.add_argument("--preset", default="tiny", choices=PRESETS)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--seed", type=int, default=21)
    parser.add_argument("--prompt-len", type=int, default=0)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--copy", default="", choices=[f for f in FORMATS if f != "bf16"])
    parser.add_argument("--no-mtp", action="store_true")
    parser.add_argument("--compare", action="store_true")
    return parser.parse_args()


def write_checkpoint(
    out: Path, preset: str, seed: int, dtype: torch.dtype, with_mtp: bool
) -> tuple[GlmMoeDsaConfig, Mtp | None, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = make_config(preset)
    generator = torch.Generator().manual_seed(seed)
    model = GlmMoeDsaForCausalLM(config).float()
    fill(model, generator)
    mtp = None
    if with_mtp:
        mtp = Mtp(config).float()
        fill(mtp, generator)
    shutil.rmtree(out, ignore_errors=True)
    model.to(dtype)
    for module in model.modules():  # a bf16 model still keeps the bias in fp32
        if isinstance(module, hf.GlmMoeDsaTopkRouter):
            module.e_score_correction_bias.data = module.e_score_correction_bias.data.float()
    model.save_pretrained(out)
    tensors = load_file(out / "model.safetensors")
    if mtp is not None:
        mtp.to(dtype)
        tensors.update(mtp.checkpoint_tensors())
    save(tensors, out)
    raw = json.loads((out / "config.json").read_text())
    raw["architectures"] = ["GlmMoeDsaForCausalLM"]
    (out / "config.json").write_text(json.dumps(raw, indent=1, sort_keys=True))
    return config, mtp, tensors


def save(tensors: dict[str, Tensor], directory: Path) -> None:
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})


def load(directory: Path, dtype: torch.dtype, attention: str = "eager") -> Any:
    return GlmMoeDsaForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=attention
    )


def write_copy(
    a: argparse.Namespace,
    form: str,
    config: GlmMoeDsaConfig,
    mtp: Mtp | None,
    tensors: dict[str, Tensor],
    prompt: Tensor,
    reference: Arrays,
) -> None:
    if form == "fp8":
        quantised, plain = fp8_blocks(tensors)
    else:
        quantised = quantise(tensors, form)
        plain = dequantise_all(quantised)
    out = a.out / form
    out.mkdir()
    save(quantised, out)
    raw = json.loads((a.out / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": {"awq": "awq"}.get(form, "compressed-tensors")}
    if form == "fp8":
        kept = sorted(
            name.removesuffix(".weight")
            for name, value in quantised.items()
            if value.dtype != torch.float8_e4m3fn and name.endswith(".weight")
        )
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": kept,
        }
    (out / "config.json").write_text(json.dumps(raw, indent=1, sort_keys=True))
    temporary = a.out / "_deq"
    temporary.mkdir()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(a.out / name, temporary / name)
    save(plain, temporary)
    model = load(temporary, getattr(torch, a.dtype))
    if mtp is not None:
        mtp.load_checkpoint(plain)
    g = goldens(model, mtp, config, prompt, a.new)
    np.savez_compressed(out / f"golden_{form}.npz", **g)
    shutil.rmtree(temporary)
    count = sum(not value.dtype.is_floating_point for value in quantised.values())
    count += sum(value.dtype == torch.float8_e4m3fn for value in quantised.values())
    shift = np.abs(g["logits_prefill"] - reference["logits_prefill"]).max()
    print(f"  {form}: {count} quantised tensors, logits shift {shift:.3f}")
    print(f"  {form} margins: {margins(g)}")


def compare(directory: Path, dtype: torch.dtype, prompt: Tensor, g: Arrays) -> None:
    """Prints how far sdpa is from eager attention, and whether generate() makes the same tokens."""
    other, new, length = load(directory, dtype, "sdpa"), len(g["greedy_tokens"]), prompt.shape[1]
    with torch.no_grad():
        logits = other(input_ids=prompt, use_cache=False).logits[0]
        generated = other.generate(
            prompt, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=1
        )[0, length:]
    gap = np.abs(to_numpy(logits) - g["logits_prefill"]).max()
    same = bool((generated.numpy() == g["greedy_tokens"]).all())
    print(f"  sdpa-vs-eager {gap:.3e}  generate() == manual: {same}")


def main() -> None:
    a = arguments()
    if transformers.__version__ != VERIFIED:
        sys.exit(f"transformers {transformers.__version__} is not the verified {VERIFIED}")
    torch.set_num_threads(1)  # two test workers may be making goldens at once
    # transformers reports the MTP tensors as UNEXPECTED: its ignore pattern names layer 78 only
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    dtype = getattr(torch, a.dtype)
    config, mtp, tensors = write_checkpoint(a.out, a.preset, a.seed, dtype, not a.no_mtp)
    model = load(a.out, dtype)  # round trip
    if mtp is not None:
        mtp.load_checkpoint(tensors)
    length = a.prompt_len or config.index_topk + 64
    generator = torch.Generator().manual_seed(a.seed + 1)
    prompt = torch.randint(4, config.vocab_size, (1, length), generator=generator)
    g = goldens(model, mtp, config, prompt, a.new)
    np.savez_compressed(a.out / "golden.npz", **g)
    if a.dtype == "float32":  # near-ties would make the golden ambiguous: pick another seed
        assert g["topk_margin_min"].min() > 3e-6, g["topk_margin_min"]
        assert g["cache_vs_full_maxabs"] < 1e-3, g["cache_vs_full_maxabs"]
        assert g["greedy_margin"].min() > 1e-3, g["greedy_margin"]
    effect = np.abs(g["logits_prefill"] - g["logits_prefill_dense"]).max()
    print(f"{a.out}: {len(tensors)} tensors, T={length} topk={config.index_topk} dtype={a.dtype}")
    print(f"  cache-vs-full {float(g['cache_vs_full_maxabs']):.3e}  sparse-vs-dense {effect:.3f}")
    if a.compare:
        compare(a.out, dtype, prompt, g)
    print(f"  margins: {margins(g)}")
    print("  greedy", g["greedy_tokens"].tolist())
    if mtp is not None:
        for share, words in ((0, "own index"), (1, "shared index")):
            print(f"  mtp drafts, {words}", g[f"mtp_draft_tokens_share{share}"].tolist())
    for form in dict.fromkeys([*(["fp8"] if a.fp8 else []), *([a.copy] if a.copy else [])]):
        write_copy(a, form, config, mtp, tensors, prompt, g)


if __name__ == "__main__":
    main()
