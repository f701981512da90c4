"""One step of a Raptor that FSDP2 divides among processes, against the same step of a whole one. Run by torchrun."""

import torch
import torch.distributed as dist
from tiny import tiny_teacher
from torch.distributed.fsdp import fully_shard

from raptor_hf import RaptorModel
from raptor_hf.distillation.module import DistillationModule, LossSettings
from raptor_hf.distillation.muon import MuonAdamW, parameter_groups
from raptor_hf.distillation.sharding import whole_model


def new_module(teacher) -> DistillationModule:
    torch.manual_seed(0)
    return DistillationModule(RaptorModel.from_teacher(teacher, [3, 3]), LossSettings())


def step(module: DistillationModule, states: torch.Tensor) -> RaptorModel:
    config = module.student.config
    # Keys' biases have no gradient but rounding's, which AdamW would scale up with its usual eps.
    optimizer = MuonAdamW(parameter_groups(module, config.num_attention_heads), lr=0.01, eps=1e-4)
    for _ in range(3):
        module(states, stage=2)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_model(module.student)


def main():
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    mesh = dist.device_mesh.init_device_mesh("cpu", (processes,))
    teacher = tiny_teacher()
    start, whole, divided = (new_module(teacher) for _ in range(3))
    for block in divided.student.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(divided, mesh=mesh)
    states = torch.randn(4, 7, 5, teacher.config.hidden_size, generator=torch.Generator().manual_seed(0))
    expected, result = step(whole, states), step(divided, states.chunk(processes)[rank])
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(result.get_parameter(name), weight, rtol=1e-3, atol=5e-4)
    moved = [not torch.equal(a, b) for a, b in zip(expected.parameters(), start.student.parameters())]
    assert sum(moved) > len(moved) // 2
    print(f"process {rank} of {processes}: equal", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
