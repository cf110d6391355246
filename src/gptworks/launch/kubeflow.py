"""TrainJobs for Kubeflow Trainer 2.2 or later. Submit them with `kubectl create`."""

from gptworks.errors import UserError, refuse_unused
from gptworks.launch.job import Job, check_time
from gptworks.launch.skypilot import dumped

SUFFIX = ".trainjob.yaml"
SUBMIT = ("kubectl", "create", "-f")

RUNTIME = "torch-distributed"
"""The ClusterTrainingRuntime that Kubeflow Trainer brings for PyTorch. Its job and its container are called `node`."""


def job_file(job: Job) -> str:
    """Return the text of a TrainJob.

    Raises:
        UserError: an option cannot be used with Kubeflow.
    """
    job.refuse_elastic("kubeflow", "a TrainJob has a fixed number of machines.")
    refuse_unused("does nothing with --on kubeflow", setup=job.setup or None)
    if not job.image:
        raise UserError("--on kubeflow needs --image NAME: a container image in which gptworks is installed.")
    if job.gpu_type:
        raise UserError(
            f"--gpus {job.gpu_type}:{job.gpus} names a type, and a TrainJob asks for a number: give --gpus {job.gpus} "
            f"and let the runtime choose the machines."
        )
    several = job.most_nodes > 1
    command = job.command(str(job.most_nodes), '"$PET_MASTER_ADDR:$PET_MASTER_PORT"' if several else None)
    resources = job.options | ({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {})
    trainer: dict[str, object] = {
        "image": job.image,
        "numNodes": job.most_nodes,
        "command": ["bash", "-c", f"exec python -m gptworks {command}".replace("$", "$$")],  # Kubernetes replaces $(…)
    }
    if resources:
        trainer["resourcesPerNode"] = {"requests": resources, "limits": dict(resources)}
    spec: dict[str, object] = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer}
    if job.time:
        check_time(job.time, r"[1-9][0-9]*", "a number of seconds, with --on kubeflow")
        spec["activeDeadlineSeconds"] = int(job.time)
    pod: dict[str, object] = {"terminationGracePeriodSeconds": job.grace_seconds}
    if job.volumes:
        names = {path: f"volume-{i}" for i, path in enumerate(job.volumes)}
        pod["volumes"] = [
            {"name": names[path], "persistentVolumeClaim": {"claimName": claim}} for path, claim in job.volumes.items()
        ]
        pod["containers"] = [
            {"name": "node", "volumeMounts": [{"name": name, "mountPath": path} for path, name in names.items()]}
        ]
    patched = {
        "template": {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}}
    }
    spec["runtimePatches"] = [{"manager": "gptworks", "trainingRuntimeSpec": patched}]
    tree: dict[str, object] = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"generateName": f"{job.label}-"},
        "spec": spec,
    }
    return "# Written by `gptworks launch --on kubeflow`.\n" + dumped(tree)
