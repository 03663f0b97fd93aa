"""Table 2: the model sizes of a suite and of the paper."""

import pandas as pd

from acp_repro.papers.acp.runs import FoXSuite

from .. import drawing, style
from ..tables import one_each
from . import naming

# Columns of paper_values.csv and fields of SizeConfig -> headers.
COLUMNS = {
    "num_hidden_layers": "layers",
    "hidden_size": "d_model",
    "head_dim": "d_head",
    "learning_rate": "peak learning rate",
    "tokens": "tokens",
}


def tabulate(suite: FoXSuite) -> drawing.Table:
    """One row per size that the suite trains, followed by one row per size of the paper."""
    ours = pd.DataFrame(
        [
            {"source": f"suite {suite.name}", "size": name}
            | {column: getattr(size, column) for column in COLUMNS}
            for name, size in suite.file.sizes.items()
            if any(run.size_name == name for run in suite.runs)
        ]
    )
    table = naming.PUBLISHED.table.query("item == 'table2' and size.notna()")
    one_each(table, ["size", "quantity"], "paper_values.csv, table2")
    paper = table.pivot_table(index="size", columns="quantity", values="low", sort=False)
    paper = paper.reset_index().assign(source="paper", tokens=paper["tokens"].to_numpy() * 1e9)
    values = pd.concat([ours, paper], ignore_index=True)[["source", "size", *COLUMNS]]
    shown = pd.DataFrame(
        {
            "size": values["size"] + " (" + values["source"] + ")",
            **{COLUMNS[name]: values[name].map("{:.0f}".format) for name in list(COLUMNS)[:3]},
            COLUMNS["learning_rate"]: values["learning_rate"].map("{:g}".format),
            COLUMNS["tokens"]: values["tokens"].map(style.count_label),
        }
    )
    return drawing.Table(shown, values)


def make(context: drawing.DrawContext) -> tuple[drawing.Table, str]:
    suite = context.suite
    lengths = sorted({run.context_length for run in suite.runs})
    training = suite.file.training
    tokens = tabulate(suite).values.groupby("source", sort=False)["tokens"]
    here, paper = (style.count_span(sizes) for _, sizes in tokens)
    caption = f"""{naming.heading(context.item)} The models of suite {suite.name} are trained on {here}
tokens, and the models of the paper on {paper} tokens. Each layer has an attention and a SwiGLU sublayer. This
suite has contexts of {", ".join(map(style.length_label, lengths))} tokens, batches of
{style.count_label(training.batch_tokens)} tokens, and a warm-up of
{style.count_label(training.warmup_tokens)} tokens. The paper has contexts of 4k, 8k and 16k tokens, batches
of 524k tokens, and a warm-up of 268M tokens."""
    return tabulate(suite), caption
