"""Who joins the batch first where policy and critic run prompts; of the policy alone see test_batcher."""

from tests.runtime.engine.test_guidance import PROMPT, TOKENIZER, guided, make_model, run, serve
from turngate.runtime.engine.batcher import Batcher
from turngate.runtime.engine.request import BatcherConfig, Request


def test_values_go_before_generations_that_wait_and_behind_values_that_came_earlier():
    config = BatcherConfig(max_running=1, max_cached_tokens=0)
    batcher = Batcher(make_model(1), TOKENIZER, config, critic=make_model(2, value_head=True))
    talk = Request(prompt_ids=PROMPT, max_tokens=4, seed=0, stop_ids=())
    value = Request(prompt_ids=PROMPT, value=True, max_tokens=0)
    running, waiting = batcher.submit(talk), batcher.submit(talk)
    batcher.step()
    first, gone, second = (batcher.submit(value) for _ in range(3))
    assert batcher.statistics().waiting == 4
    assert batcher.cancel(gone)
    order = []
    while batcher.has_work:
        order += [done.id for done in batcher.step()]
    assert order == [running, first, second, waiting]
    assert batcher.statistics().waiting == 0


def test_one_step_runs_no_more_of_the_prompts_than_it_may_through_the_critic_either(monkeypatch):
    batcher = serve(make_model(1), make_model(2, value_head=True), max_prefill_tokens=100)
    prompts = [tuple(range(n, n + 60)) for n in range(6)]
    plain = [Request(prompt_ids=prompt, max_tokens=1, seed=0, stop_ids=()) for prompt in prompts]
    run(batcher, *plain)  # the policy knows them now, the critic does not
    engine, sizes = batcher._values.rows.engine, list[int]()
    prefill = engine.prefill_hidden

    def counted(spans, **more):
        sizes[-1] += sum(len(span.ids) for span in spans)
        return prefill(spans, **more)

    monkeypatch.setattr(engine, "prefill_hidden", counted)
    for prompt in prompts:
        batcher.submit(guided(3.0, prompt=prompt, max_tokens=1))
    while batcher.has_work:
        sizes.append(0)
        batcher.step()
    assert sizes == [120, 120, 120]  # one prompt may exceed the bound
