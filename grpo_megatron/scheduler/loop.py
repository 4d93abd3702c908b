"""The training loop, and nothing else: it can be read aloud."""

from grpo_megatron.scheduler.run import Run


def train(run: Run) -> None:
    """One GRPO run. Every rank executes this function; collectives happen inside the parts."""
    run.evaluate_if_due(run.progress.next_step)
    for step in run.remaining_steps():  # starts after the last checkpoint
        with run.phase("rollout"):  # resident: policy weights, key-value cache
            rollouts = run.rollouts.take(step)  # sync: generate now; async: collect what is ready

        with run.phase("score"):  # resident: policy and reference weights
            scored = run.scores.collect(rollouts)  # rule rewards are mostly done already
            batch = run.batches.build(scored)  # advantages per group, packed by token budget
            batch = run.forward.attach(batch)  # reference log-probs, only where they are trained on

        with run.phase("update"):  # resident: weights, gradients, optimizer
            stats = run.updates.apply(batch, step)

        with run.phase("publish"):
            published = run.weights.publish(version=step + 1)
            run.rollouts.start(step + 1)  # async only; nothing in sync mode

        report = run.reporter.report(step, scored, batch, stats, published)
        run.recovery.judge(step, report)  # go on, or stop before a bad version is saved
        run.evaluate_if_due(step + 1)
        run.recovery.settle(step)  # save if it is due, end if a signal asks for it
    run.finish()  # export, plots, report
