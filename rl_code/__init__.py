"""The RL system.

Its folders are steps of the training loop. The files beside them, by subject:

    vocabulary             types.py  documents.py
    what a process runs    train.py  act.py  prefill.py  sft.py  run.py  run_model.py  schedule.py
                           stop.py
    config                 run_config.py  run_sections.py  derive.py  read_config.py  named.py
                           trust.py  workdir.py
    what is written down   checkpoint.py  checkpoint_record.py  record_keeper.py  lineage.py
                           origin.py  provenance.py  trajectory_log.py
    numbers of a step      step_metrics.py  metrics.py  metric_writers.py  journal.py  progress.py
    before a run starts    dry_run.py  attention_calls.py  traced.py
    what all of it uses    arrays.py  checksums.py  files.py  python_source.py  lines.py
"""
