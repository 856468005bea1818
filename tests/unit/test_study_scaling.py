"""The scaling study: its settings, job scripts and summary. tests/multiprocess runs one."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from yalis.cli.main import build_parser, main
from yalis.config import EngineConfig
from yalis.errors import YalisError
from yalis.parallel.plan import Split
from yalis.study import results
from yalis.study.plots import write_plot
from yalis.study.requests import ThroughputPlan, digest_requests, read_dataset
from yalis.study.results import Result
from yalis.study.scaling.settings import LOG, ScalingPlan, Setting, command_args, command_line, list_settings
from yalis.study.scaling.slurm import SlurmPlan, write_scripts
from yalis.study.scaling.summary import failed, find_result, gather
from yalis.workloads import Workload

CONFIG = EngineConfig("m", prefix_reuse=False)
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip
WORK = ThroughputPlan((Workload(2, 8, 4),), repeats=2)


def plan(folder: Path, **fields: Any) -> ScalingPlan:
    return ScalingPlan(folder, throughput=WORK, **fields)


def settings(**fields: Any) -> list[str]:
    return [setting.folder for setting in list_settings(plan(Path("x"), **fields))]


def test_settings_are_ranks_by_schemes_by_allreduces() -> None:
    assert settings(schemes=("tp", "2x2", "pp", "hybrid"), allreduces=("torch", "mpi")) == [
        *("tp1", "tp2-torch", "tp2-mpi", "pp2-torch", "pp2-mpi"),
        *("tp4-torch", "tp4-mpi", "tp2x2-torch", "tp2x2-mpi", "pp4-torch", "pp4-mpi", "tp2-pp2-torch", "tp2-pp2-mpi"),
    ]
    assert settings(ranks=(16, 8), schemes=("grid", "hybrid", "dp")) == [
        *("tp4x2-auto", "tp4-pp2-auto", "dp8-auto", "tp4x4-auto", "tp4-pp4-auto", "dp16-auto"),
    ]
    assert settings(ranks=(16,), schemes=("hybrid",), node_ranks=8) == ["tp8-pp2-auto"]
    assert settings(ranks=(8,), schemes=("tp2x2-pp2", "tp2-dp4", "grid", "tp4x2")) == [
        *("tp2x2-pp2-auto", "tp2-dp4-auto", "tp4x2-auto"),
    ]
    schemes = [setting.scheme for setting in list_settings(plan(Path("x"), ranks=(1, 4), schemes=("tp", "grid", "pp")))]
    assert schemes == ["one rank", "tp", "grid", "pp"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schemes": ("ep",)}, "unknown scheme 'ep'; accepted: tp, grid, pp, hybrid, dp, or one split such as"),
        ({"schemes": ("tp2-tp2",)}, "unknown scheme 'tp2-tp2'"),
        ({"schemes": ("tp", "3x3")}, "scheme '3x3' fits none of 1, 2, 4 ranks"),
        ({"schemes": ()}, "--schemes or --allreduce is empty"),
        ({"ranks": (0,)}, "--ranks 1,2,4"),
        ({"allreduces": ("smoke",)}, "unknown communication backend 'smoke'"),
        ({"minutes": 0}, "minutes is 0"),
        ({"node_ranks": 0}, "--tasks-per-node is 0"),
    ],
)
def test_invalid_plans_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(YalisError, match=message):
        settings(**fields)


def test_the_command_of_a_setting_parses_back_to_it(tmp_path: Path) -> None:
    work = replace(WORK, workloads=(Workload(2, 8, 4), Workload(1, 2, 3)), rate=2.5, requests=7, vary=0.5, seed=4)
    config = EngineConfig("m", max_num_seqs=3, threads=1, eager=True, prefix_reuse=False, device="cpu")
    study = ScalingPlan(tmp_path, throughput=work)
    setting = Setting(Split(2, 2, 3), "hierarchical")
    args = build_parser().parse_args(command_args(config, study, setting))
    from yalis.cli.bench_throughput import work_config, work_plan

    assert work_plan(args) == work
    assert work_config(args) == setting.apply(config)
    assert args.out == tmp_path / "tp2x2-pp3-hierarchical"
    reusing = replace(config, prefix_reuse=True)
    args = build_parser().parse_args(command_args(reusing, study, setting))
    assert work_config(args) == setting.apply(reusing)


def test_scripts_request_the_resources_of_a_setting(tmp_path: Path) -> None:
    study = plan(tmp_path / "a study", ranks=(1, 8), schemes=("tp",), allreduces=("torch", "mpi"), minutes=90)
    slurm = SlurmPlan(6, options=("--partition=gpu",))
    *scripts, submit = write_scripts(CONFIG, study, slurm, list_settings(study), tmp_path / "scripts")
    assert [script.name for script in scripts] == ["tp1.sh", "tp8-torch.sh", "tp8-mpi.sh"]
    text = scripts[1].read_text()
    for line in (
        "--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=6", "--time=01:30:00",
        f"--output='{tmp_path}/a study/tp8-torch/log.txt'", "--partition=gpu",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in text
    assert f"\nsrun {sys.executable} -m yalis bench throughput --workload 2x8x4 --repeats 2 --model m" in text
    assert f"\necho {shlex.quote(command_line(CONFIG, study, list_settings(study)[1]))}\n" in text
    assert "srun --mpi=pmix" in scripts[2].read_text()
    assert (tmp_path / "a study" / "tp8-mpi").is_dir()
    for script in (*scripts, submit):
        subprocess.run(["bash", "-n", str(script)], check=True)
    assert submit.read_text().count("sbatch ") == 3
    write(study, Setting(Split()), 1.0)  # a setting with a result needs no job
    no_gpu = SlurmPlan(gpus=False)
    again = write_scripts(CONFIG, study, no_gpu, list_settings(study), tmp_path / "again")
    assert [script.name for script in again] == ["tp8-torch.sh", "tp8-mpi.sh", "submit.sh"]
    assert "gpus" not in again[0].read_text()


def write(
    study: ScalingPlan,
    setting: Setting,
    seconds: float,
    config: EngineConfig = CONFIG,
    answers: str = "same",
    dtype: str = "float32",
    digest: str = "0123",
    **changed: Any,
) -> None:
    """Write a result as the command of the setting does."""
    row: dict[str, Any] = results.empty_row("throughput")
    row.update(engine="yalis", version="0", status="ok", requests=2, prompt_tokens=16, output_tokens=8)
    row.update(seconds=seconds, seconds_low=0.9 * seconds, seconds_high=1.1 * seconds)
    row.update(tokens_per_s=8 / seconds, first_token_ms=1.0, token_ms=2.0)
    facts = {
        **asdict(study.throughput),
        "engine": asdict(setting.apply(config)),
        "dtype": dtype,
        "answers": [answers, "b"],
    }
    facts["prompts_digest"] = digest
    device = {"type": "cpu", "name": "CPU"}
    result = results.new("throughput", facts, [row], "", [device], topology=results.make_topology([0] * setting.ranks))
    results.write(replace(result, host={**result.host, "cores": 2}, **changed), study.folder / setting.folder)


def by_split(result: Result) -> dict[str, dict[str, Any]]:
    return {row["split"]: row for row in result.rows}


def test_speed_up_and_efficiency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = plan(tmp_path, schemes=("tp", "pp"), allreduces=("torch",))
    one, tp2, _, tp4, pp4 = list_settings(study)
    for setting, seconds in ((one, 8.0), (tp2, 5.0), (tp4, 4.0)):
        write(study, setting, seconds)
    (tmp_path / pp4.folder).mkdir()
    log, output = (
        tmp_path / pp4.folder / LOG,
        "working\nyalis: error: rank 3 ended: killed by SIGKILL\nnoise of mpirun\n",
    )
    log.write_text(f"{command_line(replace(CONFIG, model='another'), study, pp4)}\n{output}")
    result = gather(CONFIG, study, list_settings(study), "yalis bench scaling")
    assert by_split(result)["pp4"]["status"] == "no result yet"  # the log is of another command
    log.write_text(f"{command_line(CONFIG, study, pp4)}\n{output}")
    result = gather(CONFIG, study, list_settings(study), "yalis bench scaling")
    results.check(asdict(result), "gathered")
    rows = by_split(result)
    assert [(rows[name]["speedup"], rows[name]["efficiency"]) for name in ("tp1", "tp2", "tp4")] == [
        (1.0, 1.0), (1.6, 0.8), (2.0, 0.5),
    ]  # fmt: skip
    assert rows["pp2"]["status"] == "no result yet"
    assert rows["pp4"]["status"] == "rank 3 ended: killed by SIGKILL"
    assert failed(result) == [rows["pp2"], rows["pp4"]]
    assert (rows["tp2"]["oversubscribed"], rows["tp4"]["oversubscribed"]) == ("", "4 ranks on 2 cores")
    assert result.notes == ["4 ranks on 2 cores: these rows show the overhead of the split, not how it scales"]
    assert results.read(tmp_path / rows["tp2"]["file"]).rows[0]["seconds"] == 5.0
    print("\n".join(results.kind_of(result).text(result)))
    out = capsys.readouterr().out
    assert "1.60x         80%\n" in out
    assert "2.00x         50% (oversubscribed)\n" in out
    assert "rank 3 ended: killed by SIGKILL\n" in out
    assert "speed-ups are relative to tp1\n" in out
    for path in write_plot(result, tmp_path / "plot.png"):
        assert path.stat().st_size > 10_000
    assert "4 ranks on 2 cores" in (tmp_path / "plot.svg").read_text()


def test_speed_ups_never_compare_different_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = plan(tmp_path, ranks=(1, 2, 4, 8), schemes=("tp",))
    one, two, four, eight = list_settings(study)
    gpu = [{"type": "cuda", "name": "H200"}]
    write(study, one, 8.0)
    write(study, two, 4.0)
    write(study, four, 1.0, devices=gpu)
    write(study, eight, 0.5, devices=gpu)
    result = gather(CONFIG, study, list_settings(study), "")
    rows = by_split(result)
    assert [rows[name]["machine"] for name in rows] == [1, 1, 2, 2]
    assert [rows[name]["speedup"] for name in rows] == [1.0, 2.0, 1.0, 2.0]
    assert [rows[name]["efficiency"] for name in rows] == [1.0, 1.0, 1.0, 1.0]
    assert result.parameters["baselines"] == {"1": "tp1", "2": "tp4-auto"}
    print("\n".join(results.kind_of(result).text(result)))
    out = capsys.readouterr().out
    assert "measured on 2 kinds of machines; speed-ups compare settings of the same kind" in out
    assert "speed-ups are relative to tp4-auto on machine 2" in out
    write_plot(result, tmp_path / "plot")


def test_ranks_that_share_cores_or_a_gpu_are_oversubscribed(tmp_path: Path) -> None:
    four = Setting(Split(4), "auto")
    gpu = [{"type": "cuda", "name": "H200"}]
    cases = [
        ({}, 1, "4 ranks on 2 cores"),
        ({"topology": results.make_topology([0, 0, 1, 1])}, 1, ""),
        ({"topology": results.make_topology([0] * 4, "srun")}, 1, ""),  # Slurm binds each rank to cores of its own
        ({"devices": gpu}, 1, ""),
        ({"devices": gpu}, 2, "2 ranks on a GPU"),
        ({"devices": gpu}, 8, "4 ranks on a GPU"),
    ]
    for number, (changed, per_gpu, sharing) in enumerate(cases):
        config = replace(CONFIG, ranks_per_gpu=per_gpu)
        study = plan(tmp_path / str(number), ranks=(4,), schemes=("tp",))
        write(study, four, 1.0, config, **changed)
        (row,) = gather(config, study, [four], "").rows
        assert row["oversubscribed"] == sharing


def test_a_single_rank_that_uses_all_cores_is_noted(tmp_path: Path) -> None:
    for threads, note in (
        (2, ["one rank used as many cores as 2 ranks, so no speed-up is possible"]),
        (1, []),
    ):
        study = plan(tmp_path / str(threads), ranks=(1, 2), schemes=("tp",))
        one, two = list_settings(study)
        write(study, one, 1.0, devices=[{"type": "cpu", "name": "CPU", "threads": threads}])
        write(study, two, 1.0, devices=[{"type": "cpu", "name": "CPU", "threads": 1}])
        assert gather(CONFIG, study, [one, two], "").notes == note


def test_different_machines_and_versions_are_noted(tmp_path: Path) -> None:
    study = plan(tmp_path, ranks=(1, 2), schemes=("tp",))
    one, two = list_settings(study)
    write(study, one, 1.0, devices=[{"type": "cpu", "name": "CPU", "threads": 2}], versions={"torch": "2.12.0"})
    write(study, two, 1.0, devices=[{"type": "cpu", "name": "another", "threads": 1}], versions={"torch": "2.13.0"})
    assert gather(CONFIG, study, [one, two], "").notes == [
        "measured on 2 kinds of machines; speed-ups compare settings of the same kind",
        "measured with 2 versions of torch: 2.12.0, 2.13.0",
    ]


def test_a_topology_without_a_launcher_is_accepted(tmp_path: Path) -> None:
    study = plan(tmp_path, ranks=(2,), schemes=("tp",))
    (two,) = list_settings(study)
    write(study, two, 1.0, topology={"ranks": 2, "ranks_per_host": [2]})
    (row,) = gather(CONFIG, study, [two], "").rows
    assert (row["status"], row["oversubscribed"], row["hosts"]) == ("ok", "", 1)


def test_different_tokens_fail_in_float32_and_are_a_share_in_bfloat16(tmp_path: Path) -> None:
    for dtype, status in (("float32", "wrong tokens: 50% of its answers equal those of tp1"), ("bfloat16", "ok")):
        study = plan(tmp_path / dtype, ranks=(1, 2), schemes=("tp",))
        one, two = list_settings(study)
        write(study, one, 2.0, dtype=dtype)
        write(study, two, 1.0, answers="another", dtype=dtype)
        result = gather(CONFIG, study, list_settings(study), "")
        row = by_split(result)["tp2"]
        assert (row["status"], row["same_tokens"]) == (status, 0.5)
        assert (row["speedup"] is None) == (row in failed(result)) == (dtype == "float32")


def test_a_folder_of_another_study_is_refused(tmp_path: Path) -> None:
    study = plan(tmp_path)
    one = Setting(Split())
    assert find_result(CONFIG, study, one) is None
    write(study, one, 1.0)
    assert find_result(CONFIG, study, one) is not None
    for config, other in (
        (replace(CONFIG, threads=7), study),
        (CONFIG, replace(study, throughput=replace(WORK, repeats=3))),
        (CONFIG, replace(study, throughput=replace(WORK, workloads=(Workload(9, 9, 9),)))),
    ):
        with pytest.raises(YalisError, match=r"belongs to another study: its \w+ is .*; give another --out"):
            find_result(config, other, one)
    write(study, one, 1.0, replace(CONFIG, block_size=64))  # the default of the measured device
    assert find_result(CONFIG, study, one) is not None
    with pytest.raises(YalisError, match="its block_size is 64, not 16"):
        find_result(replace(CONFIG, block_size=16), study, one)


def test_a_changed_dataset_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    work = ThroughputPlan((), dataset=str(file))
    study = ScalingPlan(tmp_path / "study", ranks=(1, 2), schemes=("tp",), throughput=work)
    one, two = list_settings(study)
    write(study, one, 2.0, digest=digest_requests(read_dataset(file, None)))
    assert find_result(CONFIG, study, one) is not None
    file.write_text('{"prompt": "a"}\n{"prompt": "another"}\n')
    with pytest.raises(YalisError, match=r"with other requests than .* has now; give another --out"):
        find_result(CONFIG, study, one)
    write(study, two, 1.0, digest=digest_requests(read_dataset(file, None)))
    file.unlink()
    with pytest.raises(YalisError, match="have different requests, so they cannot be compared"):
        gather(CONFIG, study, [one, two], "")


def test_the_newest_result_is_found_by_its_time_not_its_name(tmp_path: Path) -> None:
    study, one = plan(tmp_path), Setting(Split())
    for seconds in range(1, 12):
        write(study, one, float(seconds), created="2026-01-01T00:00:00+00:00")
    assert (result := find_result(CONFIG, study, one)) is not None
    assert result.rows[0]["seconds"] == 11
    write(study, one, 99.0, created="2026-01-02T00:00:00+01:00")
    newest = next((tmp_path / "tp1").glob("throughput-20260102*.json"))
    newest.rename(newest.with_name("a.json"))
    (row,) = gather(CONFIG, study, [one], "").rows
    assert (row["seconds"], row["file"]) == (99, "tp1/a.json")
    (tmp_path / "tp1" / "broken.json").write_text("{")
    with pytest.raises(YalisError, match="or remove the file, and the same command measures the setting again"):
        find_result(CONFIG, study, one)


def test_a_study_without_figures_writes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "scaling", "--out", str(tmp_path), "--ranks", "1,2", "--schemes", "tp", "--gather"]
    args += ["--model", "m", "--workload", "2x8x4", "--repeats", "2", "--plot", str(tmp_path / "plot")]
    assert main(args) == 1
    assert "no figures for 2 of 2 settings" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    write(plan(tmp_path), Setting(Split()), 1.0)
    assert main(args) == 1
    assert "no figures for 1 of 2 settings" in capsys.readouterr().err
    assert len(list(tmp_path.glob("scaling-*.json"))) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model", "no/such/folder"], "there is no 'no/such/folder'"),
        (["--workload", "2x9000x1"], "take 9001 tokens, but the context length is 512"),
        (["--dataset", "missing.jsonl"], "cannot read missing.jsonl"),
        (["--schemes", "ep"], "unknown scheme 'ep'"),
        (["--plot", "no-such-folder/plot"], "there is no folder no-such-folder"),
        (["--cpus-per-task", "0"], "--cpus-per-task is 0"),
    ],
)
@pytest.mark.parametrize("slurm", [False, True])
def test_a_workload_that_no_setting_can_run_starts_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str, slurm: bool
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    study = ["bench", "scaling", "--out", str(tmp_path / "study"), "--model", str(config), "--load", "random"]
    study += ["--slurm", str(tmp_path / "scripts")] if slurm else []
    assert main([*study, *args]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [config]


def test_a_study_under_a_launcher_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main(["bench", "scaling", "--out", str(tmp_path)]) == 2
    assert "bench scaling starts its own ranks" in capsys.readouterr().err
