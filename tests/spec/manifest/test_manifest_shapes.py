"""Manifests as people have them for Dynamo are accepted: aggregated, disaggregated, with failover; and our examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.spec.manifest.pods import pods
from tests.rigs.manifests import accepted, warnings

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
HEAD = "apiVersion: nvidia.com/v1alpha1\nkind: DynamoGraphDeployment\nmetadata:\n  name: qwen\nspec:\n"

AGGREGATED = f"""{HEAD}  backendFramework: vllm
  services:
    Frontend:
      dynamoNamespace: qwen
      componentType: frontend
      replicas: 1
      envs:
        - name: DYN_ROUTER_MODE
          value: kv
      extraPodSpec:
        mainContainer:
          image: runtime:1.0
    VllmDecodeWorker:
      dynamoNamespace: qwen
      envFromSecret: hf-token-secret
      componentType: worker
      replicas: 2
      resources:
        limits: {{gpu: "1"}}
        requests: {{cpu: "4", custom: {{ephemeral-storage: 2Gi}}}}
      sharedMemory: {{size: 16Gi}}
      extraPodSpec:
        tolerations: [{{key: nvidia.com/gpu, operator: Exists}}]
        mainContainer:
          image: runtime:1.0
          imagePullPolicy: IfNotPresent
          workingDir: /workspace/examples
          command: [python3, -m, dynamo.vllm]
          args: [--model, Qwen/Qwen3-0.6B]
          env:
            - {{name: DYN_SYSTEM_ENABLED, value: "true"}}
            - {{name: DYN_SYSTEM_PORT, value: "9090"}}
            - name: HF_TOKEN
              valueFrom: {{secretKeyRef: {{name: hf-token-secret, key: HF_TOKEN}}}}
          livenessProbe:
            httpGet: {{path: /live, port: 9090}}
            periodSeconds: 5
"""

DISAGGREGATED = f"""{HEAD}  services:
    Frontend:
      componentType: frontend
      replicas: 1
      readinessProbe:
        exec:
          command: [/bin/sh, -c, "curl -s http://localhost:8000/health | jq -e .status"]
        initialDelaySeconds: 60
      extraPodSpec:
        mainContainer:
          image: runtime:1.0
          command: [python3, -m, dynamo.frontend]
          args: [--http-port, "8080"]
    Planner:
      componentType: planner
      replicas: 1
      extraPodSpec:
        mainContainer:
          image: runtime:1.0
          command: [python3, -m, planner_sla]
          args: [--environment=kubernetes, --backend=vllm]
          volumeMounts: [{{name: profile, mountPath: /profile, readOnly: true}}]
        volumes: [{{name: profile, configMap: {{name: profile}}}}]
    VllmDecodeWorker:
      envFromSecret: hf-token-secret
      componentType: worker
      subComponentType: decode
      replicas: 2
      resources: {{limits: {{gpu: "1"}}}}
      extraPodSpec:
        mainContainer:
          image: runtime:1.0
          command: [python3, -m, dynamo.vllm]
          args: [--model, Qwen/Qwen3-0.6B, --is-decode-worker]
    VllmPrefillWorker:
      envFromSecret: hf-token-secret
      componentType: worker
      subComponentType: prefill
      replicas: 1
      resources: {{limits: {{gpu: 1}}}}
      extraPodSpec:
        mainContainer:
          image: runtime:1.0
          command: [python3, -m, dynamo.vllm]
          args: [--model, Qwen/Qwen3-0.6B, --is-prefill-worker]
"""

FAILOVER = f"""{HEAD.replace("  name: qwen", "  name: qwen  # its annotations are a cluster's")}  services:
    Frontend:
      envFromSecret: hf-token-secret
      componentType: frontend
      replicas: 1
      extraPodSpec: {{mainContainer: {{image: "runtime:1.0"}}}}
    VllmWorker:
      envFromSecret: hf-token-secret
      componentType: worker
      replicas: 1
      resources:
        limits: {{gpu: "2"}}
        requests: {{custom: {{ephemeral-storage: 2Gi}}}}
      gpuMemoryService: {{enabled: true, mode: intraPod}}
      failover: {{enabled: true, mode: intraPod}}
      extraPodSpec:
        mainContainer:
          image: runtime:1.0
          workingDir: /workspace/examples
          command: [python3, -m, dynamo.vllm]
          args: [--model, Qwen/Qwen3-0.6B, --tensor-parallel-size, "2", --load-format, gms]
"""

SHAPES = {"aggregated": AGGREGATED, "disaggregated": DISAGGREGATED, "failover": FAILOVER}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_that_people_have_are_accepted(shape: str) -> None:
    """Also fields that only a cluster reads; each of those is warned about, and nothing else is."""
    planned = pods(accepted(SHAPES[shape]))
    assert all(pod.containers for pod in planned)
    assert all(": does nothing here: " in warning for warning in warnings(SHAPES[shape]))


def test_their_own_words_are_carried_over() -> None:
    """Command, arguments, image, directory, secrets and probes are the manifest's, in every engine."""
    _, worker = pods(accepted(FAILOVER))
    assert [one.name for one in worker.init] == ["gms-weights"]
    assert [one.name for one in worker.containers] == ["engine-0", "engine-1"]
    for engine in worker.containers:
        assert engine.words[:3] == ("python3", "-m", "dynamo.vllm")
        assert (engine.image, engine.working_dir) == ("runtime:1.0", "/workspace/examples")
        assert engine.env_from_secret == "hf-token-secret"
    frontend, _, decode, prefill = pods(accepted(DISAGGREGATED))
    assert frontend.containers[0].ports[0].number == 8080
    assert frontend.containers[0].readiness is not None
    assert frontend.containers[0].readiness.delay_s == 60
    assert (decode.component, prefill.component) == ("worker-decode", "worker-prefill")
    liveness = pods(accepted(AGGREGATED))[1].containers[0].liveness
    assert liveness is not None
    assert (liveness.port, liveness.period_s) == ("9090", 5)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_our_examples_are_right(path: Path) -> None:
    """They have neither a mistake nor anything that does nothing."""
    assert pods(accepted(path.read_text()))
    assert not warnings(path.read_text())
