"""Tables from records small enough to count by hand."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from specformer import tables
from specformer.errors import UserError

MACHINE = {
    "cpu": "Test CPU",
    "cores": 2,
    "threads": 2,
    "accelerator": "none",
    "dtype": "float32",
    "torch": "2.13.0",
}
DRAFTS = {"specformer": {"m_s": 30, "m_p": 5}}


def timed(method: str, k: int, seconds: list[float], batch_size: int = 1, **machine) -> list[dict]:
    return [
        {"method": method, "batch_size": batch_size, "k": k, "round": i, "requests": 10}
        | {"tokens": 110, "seconds": s, "prefill_seconds": 1.0}
        | MACHINE
        | machine
        for i, s in enumerate(seconds)
    ]


def stepped(method: str, k: int, accepted: list[int], batch_size: int = 1, round: int = 0) -> list[dict]:
    return [
        {"method": method, "batch_size": batch_size, "k": k, "round": round, "request": "a"}
        | {"drafted": k, "accepted": a, "committed": a + 1, "truncated": 0}
        for a in accepted
    ]


def plain(rounds: int, batch_size: int = 1) -> list[dict]:
    """The baseline's steps: answers of 11 tokens, the first from the prefill."""
    return [step for r in range(rounds) for step in stepped("none", 0, [0] * 10, batch_size, r)]


def records() -> tuple[pd.DataFrame, pd.DataFrame]:
    throughput = [
        *timed("none", 0, [11.0, 22.0, 11.0]),
        *timed("specformer", 4, [5.5, 11.0, 10.0]),
        *timed("specformer", 8, [11.0, 22.0, 11.0]),
    ]
    steps = [*stepped("specformer", 4, [0, 1, 2, 1]), *stepped("specformer", 8, [0, 0, 0, 1]), *plain(3)]
    return pd.DataFrame(throughput), pd.DataFrame(steps)


def table1(throughput=None, steps=None, **options) -> pd.DataFrame:
    first, second = records()
    return tables.build_table1(
        first if throughput is None else throughput,
        second if steps is None else steps,
        base_model="Tiny-1M",
        base_parameters=100,
        drafts=DRAFTS,
        **options,
    )


def test_table1_by_hand():
    table = table1()
    paper = tables.paper_table(1)
    assert list(table.columns[: len(paper.columns)]) == list(paper.columns)
    assert table[["k", "method"]].values.tolist() == [
        [4, "none"],
        [4, "specformer"],
        [8, "none"],
        [8, "specformer"],
    ]
    none, four, _, eight = table.to_dict("records")
    assert none["kappa"] == none["speedup"] == none["theta"] == none["p"] == 1.0
    assert (none["tps"], none["tps_min"], none["tps_max"]) == (10.0, 5.0, 10.0)
    assert none["tps_decode"] == 10.0  # (110 - 10) / (11 - 1)
    assert four["kappa"] == 2.0
    assert four["tps"] == pytest.approx(11.0)
    assert four["speedup"] == pytest.approx(1.1)
    assert (four["speedup_min"], four["speedup_max"]) == pytest.approx((1.1, 2.0))
    assert four["theta"] == pytest.approx(2.0 / 1.1)
    assert four["p"] == pytest.approx(1.5)  # 1 + (30 + 4 * 5) / 100
    assert eight["p"] == pytest.approx(1.7)
    # identical rounds: exactly 1
    assert eight["speedup"] == eight["speedup_min"] == eight["speedup_max"] == 1.0
    assert (eight["requests"], eight["rounds"]) == (10, 3)
    assert eight["base_model"] == "Tiny-1M" and eight["cpu"] == "Test CPU"


def test_prompts_of_answers_that_the_round_cut_off_slow_nobody():
    """20 prompts at 0.1 s for answers of 11 tokens, 100 of them decoded at 10 a second: an answer costs
    0.1 + 10 / 10 s, as it does in the baseline's round of 10 prompts."""
    throughput, steps = records()
    drafted = throughput["k"] == 4
    throughput.loc[drafted, ["requests", "tokens", "prefill_seconds", "seconds"]] = [20, 120, 2.0, 12.0]
    throughput.loc[~drafted, "seconds"] = 11.0
    four = table1(throughput, steps).set_index(["k", "method"]).loc[(4, "specformer")]
    assert four["tps"] == pytest.approx(10.0) and four["speedup"] == pytest.approx(1.0)


def test_a_tree_method_is_shown_as_the_chain_that_it_ran_as():
    throughput, steps = records()
    throughput = pd.concat([throughput, pd.DataFrame(timed("hass", 4, [10.0] * 3))])
    steps = pd.concat([steps, pd.DataFrame(stepped("hass", 4, [1]))])
    table = table1(throughput, steps, labels={"hass": "HASS (chain)"})
    assert set(zip(table["method"], table["label"], strict=True)) == {
        ("none", "none"), ("specformer", "specformer"), ("hass", "HASS (chain)"),
    }  # fmt: skip
    compared = tables.compare(table, tables.paper_table(1), tables.TABLE1_KEYS)
    text = tables.to_markdown(compared, title="Table 1", caption="x")
    assert text.count("| 1 | 4 | HASS (chain) | 2.00 |") == 1 and "| 1 | 8 | hass | not run |" in text


def test_rows_follow_the_papers_order_whatever_the_records_order():
    throughput, steps = records()
    extra = timed("zeta", 4, [10.0] * 3) + timed("hass", 4, [10.0] * 3)
    throughput = pd.concat([pd.DataFrame(extra), throughput]).iloc[::-1]
    steps = pd.concat([pd.DataFrame(stepped("zeta", 4, [1]) + stepped("hass", 4, [1])), steps])
    table = table1(throughput, steps)
    at_four = table[table["k"] == 4]["method"].tolist()
    assert at_four == ["none", "hass", "specformer", "zeta"]
    assert pd.isna(table.set_index(["k", "method"]).at[(4, "zeta"), "p"])  # no parameter counts given


def test_two_machines_are_refused_and_both_named():
    throughput, steps = records()
    throughput.loc[4, "cpu"] = "Other CPU"
    with pytest.raises(UserError, match="(?s)Test CPU.*Other CPU"):
        table1(throughput, steps)
    throughput, steps = records()
    throughput.loc[4, "dtype"] = "bfloat16"
    with pytest.raises(UserError, match="(?s)float32.*bfloat16"):
        table1(throughput, steps)


def test_records_that_cannot_make_a_table_are_refused():
    throughput, steps = records()
    with pytest.raises(UserError, match="seconds"):
        table1(throughput.drop(columns="seconds"), steps)
    with pytest.raises(UserError, match=r"specformer at batch size 1, k 4.*step records"):
        table1(throughput, steps[steps["k"] != 4])
    with pytest.raises(UserError, match=r"round 0 at batch size 1.*baseline"):
        table1(throughput, steps[steps["k"] != 0])
    with pytest.raises(UserError, match=r"k 4 has rounds \[0, 1\] but the baseline"):
        table1(throughput.drop(index=5), steps)
    with pytest.raises(UserError, match=r"round\s+0\s+twice"):
        table1(pd.concat([throughput, throughput.head(1)]), steps)
    with pytest.raises(UserError, match="empty"):
        table1(throughput.head(0), steps)


def test_the_baseline_alone_makes_a_table():
    throughput, steps = records()
    table = table1(throughput[throughput["k"] == 0], steps)
    assert table[["k", "method", "speedup"]].values.tolist() == [[0, "none", 1.0]]


def ablation() -> pd.DataFrame:
    throughput = [
        *timed("none", 0, [11.0] * 3),
        *timed("specformer", 8, [5.5] * 3),
        *timed("specformer_no_self_distill", 8, [12.5] * 3),
    ]
    steps = [
        *stepped("specformer", 8, [2, 1]),
        *stepped("specformer_no_self_distill", 8, [0, 0, 1]),
        *plain(3),
    ]
    return tables.build_table2(
        pd.DataFrame(throughput),
        pd.DataFrame(steps),
        base_model="Tiny-1M",
        base_parameters=100,
        drafts=DRAFTS | {"specformer_no_self_distill": DRAFTS["specformer"]},
        draft_length=8,
    )


def test_table2_by_hand():
    table = ablation()
    paper = tables.paper_table(2)
    assert list(table.columns[: len(paper.columns)]) == list(paper.columns)
    assert table["variant"].tolist() == paper["variant"].tolist()
    assert table["draft_length"].tolist() == [1, 8, 8]
    assert table["kappa"].tolist() == pytest.approx([1.0, 4 / 3, 2.5])
    assert table["speedup"].tolist() == pytest.approx([1.0, 0.88, 2.0])


def test_table2_without_its_methods_is_refused():
    throughput, steps = records()
    with pytest.raises(UserError, match="hold: hass"):
        tables.build_table2(
            pd.DataFrame(timed("hass", 4, [1.5])),
            steps,
            base_model="x",
            base_parameters=1,
            drafts={},
            draft_length=8,
        )


def test_comparison_has_every_row_of_both_sides():
    ours = table1()
    extra = ours.tail(1).assign(batch_size=2)
    compared = tables.compare(pd.concat([ours, extra]), tables.paper_table(1), tables.TABLE1_KEYS)
    assert len(compared) == len(tables.paper_table(1)) + 1
    assert compared["status"].value_counts().to_dict() == {
        "not run": 56,
        "measured": 4,
        "not in the paper": 1,
    }
    row = compared[(compared["k"] == 4) & (compared["method"] == "specformer")].iloc[0]
    assert (row["kappa"], row["kappa_paper"]) == (2.0, 2.20)
    assert row["kappa_difference"] == pytest.approx(-0.2)
    assert row["speedup_difference"] == pytest.approx(1.1 - 1.78)
    assert row["theta_paper"] == pytest.approx(2.20 / 1.78)
    assert compared["batch_size"].is_monotonic_increasing


def test_markdown_and_html_say_not_run_and_carry_the_caption():
    compared = tables.compare(table1(), tables.paper_table(1), tables.TABLE1_KEYS)
    text = tables.to_markdown(compared, title="Table 1", caption="Tiny-1M on a Test CPU")
    assert "| 1 | 4 | specformer | 2.00 | 2.20 | -0.20 | 1.10 (1.10 to 2.00) | 1.78 |" in text
    assert "| 128 | 8 | specformer | not run | 2.24 | – | not run |" in text
    assert "Tiny-1M on a Test CPU" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths == {len(tables.TABLE1_KEYS) + 12}
    page = tables.to_great_table(compared, title="Table 1", caption="Tiny-1M").as_raw_html()
    again = tables.to_great_table(compared, title="Table 1", caption="Tiny-1M").as_raw_html()
    assert page == again and "not run" in page and "1.10 (1.10 to 2.00)" in page


def test_a_k_that_the_engine_chooses_is_said_to_be_its_choice():
    compared = tables.compare(table1(), tables.paper_table(1), tables.TABLE1_KEYS)
    measured = compared["status"] != "not run"
    for name in ("method", "label"):
        compared.loc[measured, name] = compared.loc[measured, name] + tables.AUTO
    text = tables.to_markdown(compared, title="Table 1", caption="Tiny-1M on a Test CPU")
    assert "| 1 | auto, 0 to 4 | specformer_auto | 2.00 |" in text
    assert "| 128 | 8 | specformer | not run |" in text


def test_csv_bytes_are_fixed_and_read_back(tmp_path):
    throughput, steps = records()
    tables.write_csv(table1(), tmp_path / "new" / "one.csv")
    tables.write_csv(table1(throughput.iloc[::-1], steps.iloc[::-1]), tmp_path / "two.csv")
    one = (tmp_path / "new" / "one.csv").read_bytes()
    assert one == (tmp_path / "two.csv").read_bytes()
    assert b"\r" not in one
    assert one.splitlines()[2] == (
        b"1,4,specformer,2.000,11.00,1.100,10.00,20.00,1.100,2.000,1.818,1.5000,11.11,10,3,"
        b"specformer,Tiny-1M,float32,2,Test CPU,none"
    )
    back = pd.read_csv(tmp_path / "two.csv")
    compared = tables.compare(back, tables.paper_table(1), tables.TABLE1_KEYS)
    assert compared["status"].tolist().count("measured") == 4


def test_metrics_are_flat_finite_and_sorted(tmp_path):
    found = tables.collect_metrics(
        table1=table1(), table2=ablation(), extra={"rho": 7.60863, "lossless_requests": 32}
    )
    assert found["table1_specformer_b1_k4_speedup"] == 1.1
    assert found["table2_self_distill_b1_k8_kappa"] == 2.5
    assert found["rho"] == 7.6086 and found["lossless_requests"] == 32
    assert list(found) == sorted(found)
    tables.write_metrics(found, tmp_path / "metrics.json")
    assert json.loads((tmp_path / "metrics.json").read_text()) == found
    with pytest.raises(ValueError, match="rho"):
        tables.collect_metrics(extra={"rho": float("nan")})
    with pytest.raises(ValueError, match="already"):
        tables.collect_metrics(table1=table1(), extra={"table1_none_b1_k4_tps": 1.0})


def test_the_packaged_numbers_are_whole():
    assert [len(tables.paper_table(n)) for n in (1, 2, 3, 4)] == [60, 3, 45, 4]
    with pytest.raises(ValueError, match="1-4"):
        tables.paper_table(5)
