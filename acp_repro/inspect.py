"""Reports what each head prunes: ``python -m acp_repro.inspect MODEL [--text FILE] [--html PAGE]``.

MODEL is a FoX checkpoint folder in the authors' format, a run folder such as runs/cpu/NAME, or a decoder that
transformers loads, by folder or by its name on the Hub. For a FoX model the table lists the pruned ratio, the
effective context and the mean gate of each head. For another decoder the table lists the keys that receive
the weight, and the blocks that could be skipped. --rules adds a table of published sparse-attention rules:
the blocks that each rule would skip, and the lost weight (docs/rules.md). --html also writes a page of
every head and of the tokens that each token attends to (docs/heads.md).
"""

import argparse
from pathlib import Path

from .common import files
from .common.command import (
    DEFAULT_CONTEXT_LENGTH,
    add_text_options,
    bounded,
    checkpoint_parser,
    choose_device,
    command,
    output_file,
    positive,
    progress_bar,
    run_command,
)
from .common.errors import UsageError
from .explorer.checkpoint import Checkpoint, is_fox
from .model.config import LogEpsilon
from .pipeline.data.sources import SampleSource, check_length, open_text

DEFAULT_TOKENS = 32_768


@command(extra="inspect")
def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if not is_fox(options.model):
        return _inspect_decoder(options)
    paths = [path for path in (options.model, options.compare) if path is not None]
    opened = [Checkpoint(path) for path in paths]  # before torch is imported
    length = options.context_length or opened[0].context_length or DEFAULT_CONTEXT_LENGTH
    check_length(options.text, length)
    device = choose_device(options.device)

    from .explorer import inspect_heads, read_heads, weigh_heads
    from .explorer.explorer import Explorer, check_comparable
    from .explorer.heads_table import print_decoder, print_heads
    from .pipeline.data.text_checkpoint import BATCH_TOKENS, TextCheckpoint

    checkpoint, *others = map(TextCheckpoint, paths)
    for other in others:  # before anything is computed
        check_comparable(checkpoint.name, checkpoint.config, other.name, other.config)
        _check_reads_like(checkpoint, other)
    input_ids = checkpoint.input_ids(
        length, options.tokens or DEFAULT_TOKENS, text=options.text, token_ids=options.token_ids
    )
    without_gates = any(one.config.use_rope for one in (checkpoint, *others))
    epsilon = {"log_pruning_tolerance": options.log_pruning_tolerance}

    def measure(function, checkpoint):
        model = checkpoint.load(device)
        if without_gates:  # for both models, so that they have the same columns
            return read_heads(model, input_ids, progress=True, **epsilon)
        batches = input_ids.split(max(1, BATCH_TOKENS // length))
        return function(
            model,
            (batch.to(device) for batch in progress_bar(batches, unit="batch", leave=False)),
            dtype=checkpoint.autocast_dtype(device),
            **epsilon,
        )

    source = checkpoint.source(options.text, options.token_ids)
    if options.html or without_gates:  # the page is rendered when it is saved
        # The page names the file without its folder, which is of no use to another reader.
        given = options.token_ids or options.text
        facts = [Path(given).name if given else source.partition(" (--")[0]]
        models = [measure(weigh_heads, one) for one in (checkpoint, *others)]
        for one, model in zip((checkpoint, *others), models, strict=True):
            model.name, model.facts = one.name, facts
        page = Explorer(*models, tokenizer=checkpoint.tokenizer)
        heads = models[0].table if without_gates else models[0].table.loc[:, :"log_pruning_tolerance"]
    else:
        heads, page = measure(inspect_heads, checkpoint), None
    print(f"text: {source}")
    (print_decoder if without_gates else print_heads)(str(checkpoint.folder), heads, options.sort)
    rules = options.rules and _measure_rules(
        options, checkpoint.load(device), input_ids, checkpoint.name, source
    )
    return _write_files(options, heads, page, rules)


def _measure_rules(options: argparse.Namespace, model, ids, name: str, text: str) -> dict:
    """Prints and returns the skipped blocks and the lost weight of each rule on the first sequence."""
    from .explorer.rule_table import head_map, measure_rules, print_rules

    table = measure_rules(model, ids[:1], log_pruning_tolerance=options.log_pruning_tolerance, progress=True)
    print_rules(table)
    return head_map(table, name, Path(text).name, ids.shape[1])


def _write_files(options: argparse.Namespace, heads, page, rules: dict | None) -> int:
    if rules:
        files.write_json(options.rules, rules)
        print(f"rules   {options.rules.resolve()}")
    if options.csv:
        files.write_text(options.csv, heads.to_csv(index=False))
        print(f"csv     {options.csv.resolve()}")
    if options.html:
        page.models[0].rules = rules
        path = page.save(options.html)
        print(f"html    {path.resolve()} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def _inspect_decoder(options: argparse.Namespace) -> int:
    """Inspects a decoder of transformers."""
    if options.compare:
        raise UsageError(f"--compare pairs two FoX models; {options.model} is another decoder")
    check_length(options.text, 1)
    device = choose_device(options.device)

    from .explorer import Explorer, read_heads
    from .explorer.decoders import load_decoder
    from .explorer.heads_table import print_decoder
    from .pipeline.data.text_checkpoint import read_ids

    model, tokenizer = load_decoder(options.model, device)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = options.context_length or min(DEFAULT_CONTEXT_LENGTH, longest or DEFAULT_CONTEXT_LENGTH)
    count = max(options.tokens or length, length)
    if options.token_ids:
        ids = read_ids(options.token_ids, length, count)
    elif tokenizer is None:
        raise UsageError(f"{options.model} has no tokenizer; give token ids: --token-ids FILE.npy")
    else:
        text = "".join(document.data.decode() for document in open_text(options.text).documents())
        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
        if len(ids) < length:
            raise UsageError(f"the text has {len(ids)} tokens; give that --context-length, or a longer text")
        ids = ids[: min(count, len(ids)) // length * length].view(-1, length)
    heads = read_heads(model, ids, log_pruning_tolerance=options.log_pruning_tolerance, progress=True)
    given = options.token_ids or options.text
    heads.facts = [Path(given).name if given else SampleSource.title]
    print(f"text: {given or SampleSource.title}")
    print_decoder(options.model, heads.table, options.sort)
    for line in heads.skipped:
        print(f"skipped {line}")
    rules = options.rules and _measure_rules(options, model, ids, heads.name, given or SampleSource.title)
    return _write_files(options, heads.table, Explorer(heads, tokenizer=tokenizer), rules)


def _check_reads_like(one: Checkpoint, other: Checkpoint) -> None:
    first, second = ((c.config.vocab_size, getattr(c.tokenizer, "json_text", None)) for c in (one, other))
    if first != second:
        raise UsageError(
            f"{one.name} and {other.name} have different tokenizers; compare models that read the same tokens"
        )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = checkpoint_parser("inspect", __doc__)
    add_text_options(parser)
    add = parser.add_argument
    add(
        "--tokens",
        type=positive,
        metavar="N",
        help=f"read at most this many tokens (default: {DEFAULT_TOKENS}, or one sequence if that is longer)",
    )
    add(
        "--log-pruning-tolerance",
        type=bounded(LogEpsilon),
        metavar="X",
        help="log epsilon (default: the model's own, or -10 if it is exact)",
    )
    add("--sort", choices=("pruned", "layer"), default="pruned", help="order of the heads (default: pruned)")
    add("--csv", type=output_file, metavar="FILE", help="also write all columns to this file")
    add(
        "--html",
        type=output_file,
        metavar="PAGE",
        help="also write a self-contained page of every head on the first sequence",
    )
    add(
        "--rules",
        nargs="?",
        const=Path("head_map.json"),
        type=output_file,
        metavar="FILE",
        help="also print what published rules of sparse attention skip and lose on the first sequence, "
        "write it for each head (default: head_map.json), and show it on the page of --html",
    )
    add("--compare", metavar="OTHER", help="show a second model of the same shape on that page")
    options = parser.parse_args(arguments)
    if options.compare is not None and not options.html:
        parser.error("--compare shows two models on one page; add --html PAGE")
    return options


if __name__ == "__main__":
    run_command(main)
