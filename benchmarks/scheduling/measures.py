"""What a run is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from benchmarks.scheduling.engine import Engine, Job, quantile

TTFT_S = (1.0, 2.0, 60.0)
ITL_S = 0.1
SHORT = 512


def measures(jobs: Sequence[Job], engine: Engine) -> dict[str, float]:
    good = 0
    itls: list[float] = []
    for job in jobs:
        if job.refused or job.first_at is None:
            continue
        itl = quantile(engine.gaps(job), 0.99)
        itls.append(itl)
        in_time = job.first_at - job.arrival <= TTFT_S[job.cls]
        good += in_time and (job.cls > 1 or itl <= ITL_S)

    def ttfts(keep: Sequence[Job]) -> list[float]:
        return [job.first_at - job.arrival for job in keep if job.first_at is not None]

    served = [job for job in jobs if job.first_at is not None]
    chat = ttfts([job for job in served if job.tenant.startswith("chat")])
    short = ttfts([j for j in served if j.cls == 1 and j.prompt < SHORT and j.tenant != "noisy"])
    vip = ttfts([job for job in served if job.cls == 0])
    batch = ttfts([job for job in served if job.cls == 2])
    noisy = [job for job in jobs if job.tenant == "noisy"]
    others = [job for job in jobs if job.tenant != "noisy"]
    return {
        "goodput": good / len(jobs),
        "vip_p99": quantile(vip, 0.99),
        "chat_p50": quantile(chat, 0.5),
        "chat_p99": quantile(chat, 0.99),
        "short_p99": quantile(short, 0.99),
        "max_wait": max(ttfts(served), default=0.0),
        "batch_max_wait": max(batch, default=0.0),
        "shed_noisy": mean(job.refused for job in noisy) if noisy else 0.0,
        "shed_others": mean(job.refused for job in others),
        "itl_p99": quantile([itl for job, itl in zip(served, itls, strict=True)], 0.99),
        "makespan": max((job.done_at or 0.0) for job in jobs),
    }


def fleet_measures(jobs: Sequence[Job], engine: Engine) -> dict[str, float]:
    """Where all are of one class: the figures that matter between tenants. Jain's index is over
    the share of each tenant's offered work that was served in time."""
    in_time: dict[str, float] = {}
    offered: dict[str, float] = {}
    good = 0
    for job in jobs:
        work = job.prompt - job.shared + 2.0 * job.output
        offered[job.tenant] = offered.get(job.tenant, 0.0) + work
        if job.refused or job.first_at is None or job.first_at - job.arrival > TTFT_S[job.cls]:
            continue
        if quantile(engine.gaps(job), 0.99) <= ITL_S:
            good += 1
            in_time[job.tenant] = in_time.get(job.tenant, 0.0) + work
    shares = [in_time.get(tenant, 0.0) / work for tenant, work in offered.items()]
    squares = sum(share * share for share in shares)
    waits = [job.first_at - job.arrival for job in jobs if job.first_at is not None]
    return {
        "requests": len(jobs),
        "tenants": len(offered),
        "goodput": round(good / len(jobs), 4),
        "ttft_p50": round(quantile(waits, 0.5), 4),
        "ttft_p99": round(quantile(waits, 0.99), 4),
        "max_wait": round(max(waits, default=0.0), 2),
        "shed": round(mean(job.refused for job in jobs), 4),
        "worst_tenant": round(min(shares), 4),
        "jain": round(sum(shares) ** 2 / (len(shares) * squares), 4) if squares else 0.0,
    }
