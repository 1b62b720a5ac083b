"""Text to batches: prepare it once, then feed it as a pure function of the cursor.

    from megamodel.data.config import Data                       the section `data`
    from megamodel.data.prepare import prepare                   text -> tokenizer and token files, once
    from megamodel.data.prepared import open_prepared, Prepared  what is there already
    from megamodel.data.loader import Loader                     Loader.at(cursor) -> the batches of a step
    from megamodel.data.prefetch import Prefetcher               the same, one step ahead in a thread
    from megamodel.data.held_out import HeldOut                  evaluation, source by source
    from megamodel.data.baselines import baselines               what the model must beat
    from megamodel.data.batch import Batch, Cursor, IGNORE

A whole round:

    prepared = prepare(data, tokenizer)
    loader = Loader(prepared.train, sequence_length=512, seed=0, isolate_documents=data.isolate_documents,
                    mixture=data.weights(), vocab_size=prepared.tokenizer.vocab_size)
    step = loader.at(Cursor(), micro_batch=4, accumulation=2, data_rank=0, data_size=1)

Order of the files, each needing only those before it: config, sources (which files), blocks and tables (files
in pieces), records (the policy), encode (worker processes), tokens (files and corpora), prepared, prepare;
order, windows, loader, held_out, prefetch, baselines. The package imports nothing by itself, so that the
processes that tokenise start fast.
"""
