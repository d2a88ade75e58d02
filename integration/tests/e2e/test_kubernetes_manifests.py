"""The Kubernetes manifests of the pages: their schema, and what an API server asks beyond it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from pcomm.core.process import RankPlace
from pcomm.core.process.store_server import command as store_command
from pcomm.integration.commands.train import command as train_command

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to"
PAGES = ("start-ranks-by-a-launcher.md", "operate-a-run.md")
# Those that have the limit for each index: it came in 1.28, and is on by default since.
OLDEST = "1.29"


def manifests(page: str) -> dict[str, Any]:
    """The resources of a page, by their kind."""
    (text,) = (HOW_TO / page).read_text().split("```yaml\n")[1:]
    found = list(yaml.safe_load_all(text.split("\n```")[0]))
    kinds = {one["kind"]: one for one in found}
    assert len(kinds) == len(found)
    return kinds


def pod_of(resource: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The spec of a resource's pods, and its one container."""
    pod = resource["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    return pod, container


def arguments_of(command: Any, container: dict[str, Any]) -> argparse.Namespace:
    """What a command of pcomm reads of the words of a container; an unknown one is an error."""
    assert container["command"][:2] == ["pcomm", command.name]
    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)
    return parser.parse_args(container["command"][2:])


@pytest.mark.parametrize("page", PAGES)
def test_every_manifest_has_the_schema_of_old_and_new_kubernetes(page: str) -> None:
    reason = "`pip install kubernetes-validate` brings the schemas, 70 MB of them"
    kubernetes = pytest.importorskip("kubernetes_validate", reason=reason)
    for resource in manifests(page).values():
        for version in (OLDEST, kubernetes.latest_version()):
            kubernetes.validate(resource, version, strict=True)
            # Strict: a field that is misspelt is no field.
            wrong = json.loads(json.dumps(resource))
            wrong["spec"]["completionmode"] = "Indexed"
            with pytest.raises(kubernetes.ValidationError, match="completionmode"):
                kubernetes.validate(wrong, version, strict=True)


@pytest.mark.parametrize("page", PAGES)
def test_a_job_asks_for_what_a_server_grants_together(page: str) -> None:
    job = manifests(page)["Job"]
    spec, (pod, container) = job["spec"], pod_of(job)
    # Else no pod has JOB_COMPLETION_INDEX; and ranks wait for those that are not started.
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    # The limit of each index is refused with any other policy: pods are replaced, not restarted.
    assert pod["restartPolicy"] == "Never"
    assert ("backoffLimitPerIndex" in spec) != ("backoffLimit" in spec)
    if "backoffLimitPerIndex" in spec:
        assert 0 < spec["maxFailedIndexes"] <= spec["completions"]
    # For the checkpoint after SIGTERM; 30 seconds are the default.
    assert pod["terminationGracePeriodSeconds"] > 30
    claims = {one["name"] for one in pod["volumes"]}
    (mount,) = container["volumeMounts"]
    assert mount["name"] in claims
    assert f"--out {mount['mountPath']}/" in " ".join(container["command"])


def test_ranks_of_the_job_find_each_other_in_the_store_of_the_page() -> None:
    kinds = manifests("start-ranks-by-a-launcher.md")
    service, deployment, job = kinds["Service"], kinds["Deployment"], kinds["Job"]
    name, spec = service["metadata"]["name"], deployment["spec"]
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"]
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    # Of two stores at once, ranks would meet in either one.
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    store = arguments_of(store_command, pod_of(deployment)[1])
    ports = [one["port"] for one in service["spec"]["ports"]]
    assert (ports, store.host) == ([store.port], "0.0.0.0")

    _, container = pod_of(job)
    train = arguments_of(train_command, container)
    assert train.resilient
    assert (train.store, train.rank, train.ranks) == (None, None, 1)
    # The node's name comes from the cluster.
    own = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    size = job["spec"]["completions"]
    # As Kubernetes names the pods of a job for their programs, beside what the page gives them.
    for rank in range(size):
        place = RankPlace.from_environment(environ={**own, "JOB_COMPLETION_INDEX": str(rank)})
        assert place == RankPlace(rank, size, name, store.port)
