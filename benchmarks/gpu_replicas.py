"""Many replicas on one GPU: the time of an epoch against that of one replica, same samples, batch and network.

    python benchmarks/gpu_replicas.py                               # 1,536 replicas on 656,100 samples, as the paper had GPUs
    python benchmarks/gpu_replicas.py --samples 196608              # one batch each: the most switches there can be, in a third

ResNet-50 on 1×120×85, batch 128, bf16, captured; mean of weights once per epoch. A replica's turn starts from the agreed weights
and momentum (one copy of a slice of the arena) and ends by being added to the sum. Of the 428 samples of each, the last make a
smaller batch.
"""

import torch

import bench
from gpu import SMALL, deepex_epochs, timed
from peers import Workload


def main() -> None:
    options = bench.arguments(__doc__, repeats=3, replicas=1536, samples=656_100)
    bench.need_gpu()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    workload = Workload(
        name="replicas",
        net="resnet50",
        shape=SMALL,
        classes=27,
        batch=128,
        task="classify",
        augment=False,
        count=options.samples,
    )
    _, _, data = bench.random_data(workload.shape, workload.classes, workload.count)
    contestants, learners = {}, []
    for replicas in (1, options.replicas):
        epoch, learner = deepex_epochs(workload, data, replicas=replicas)
        contestants[f"{replicas} replicas"] = timed(epoch)
        learners.append(learner)
    found = bench.in_turns(contestants, options.repeats, warm_ups=1)
    one, many = found.values()
    against = bench.ratio(many, one)
    rows = [[name, f"{min(seconds):.2f}", f"{workload.count / min(seconds):,.0f}"] for name, seconds in found.items()]
    bench.print_table(f"epoch of {workload.count:,} samples", ["", "seconds", "images/s"], rows)
    print(f"time, many over one: {bench.show_ratio(against)}")
    result = {"replicas": options.replicas, "samples": options.samples, "seconds": found, "many_over_one": against}
    bench.write_record("gpu_replicas", result, keep=options.keep)


if __name__ == "__main__":
    main()
