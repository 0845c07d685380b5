"""Which of Lightning's tests are run, and why some of them end otherwise under this project's strategy."""

PROCESSES = (
    "tests_pytorch/callbacks/test_early_stopping.py::test_multiple_early_stopping_callbacks",
    "tests_pytorch/callbacks/test_pruning.py::test_pruning_callback_ddp_cpu",
    "tests_pytorch/callbacks/test_spike.py::test_trainer_spike_detection_integration",
    "tests_pytorch/callbacks/test_stochastic_weight_avg.py::test_swa_callback_ddp_cpu",
    "tests_pytorch/callbacks/test_weight_averaging.py::test_ema_ddp_spawn_cpu",
    "tests_pytorch/callbacks/test_weight_averaging.py::test_ema_resume_ddp",
    "tests_pytorch/checkpointing/test_model_checkpoint.py::test_model_checkpoint_no_extraneous_invocations",
    "tests_pytorch/checkpointing/test_torch_saving.py::test_model_torch_save_ddp_cpu",
    "tests_pytorch/models/test_amp.py::test_amp_cpus",
    "tests_pytorch/models/test_cpu.py::test_multi_cpu_model_ddp",
    "tests_pytorch/strategies/test_ddp_integration.py::test_ddp_cpu",
    "tests_pytorch/strategies/test_ddp_integration.py::test_ddp_spawn_add_get_queue",
    "tests_pytorch/strategies/launchers/test_multiprocessing.py",
    "tests_pytorch/trainer/flags/test_overfit_batches.py::test_distributed_sampler_with_overfit_batches",
    "tests_pytorch/trainer/logging_/test_distributed_logging.py",
    "tests_pytorch/trainer/properties/test_get_model.py::test_get_model_ddp_cpu",
    "tests_pytorch/trainer/test_trainer.py::test_error_handling_all_stages",
    "tests_pytorch/trainer/test_trainer.py::test_fit_test_synchronization",
    "tests_pytorch/trainer/test_trainer.py::test_model_in_correct_mode_during_stages",
    "tests_pytorch/trainer/test_trainer.py::test_spawn_predict_return_predictions",
    "tests_pytorch/trainer/connectors/test_data_connector.py::test_replace_distributed_sampler",
    "tests_pytorch/trainer/connectors/test_data_connector.py::test_eval_shuffle_with_distributed_sampler_replacement",
    "tests_pytorch/utilities/test_combined_loader.py::test_combined_dataloader_for_training_with_ddp",
    "tests_pytorch/utilities/test_compile.py",
    "tests_pytorch/tuner/test_scale_batch_size.py::test_batch_size_finder_with_distributed_strategies",
    "tests_pytorch/tuner/test_tuning.py::test_tuner_with_distributed_strategies",
)
"""Tests that start processes for DDP themselves."""

ONE = (
    "tests_pytorch/models/test_hooks.py",
    "tests_pytorch/trainer/logging_/test_logger_connector.py",
    "tests_pytorch/trainer/logging_/test_train_loop_logging.py",
    "tests_pytorch/trainer/optimization/test_optimizers.py",
    "tests_pytorch/core/test_lightning_optimizer.py",
    "tests_pytorch/callbacks",
    "tests_pytorch/checkpointing",
    "tests_pytorch/tuner",
)
"""Tests that train in one process."""

WITHOUT = ("tests_pytorch/checkpointing/test_legacy_checkpoints.py",)
"""Files that need what a checkout does not have: checkpoints of old versions."""

LISTS = {"processes": PROCESSES, "one": ONE}

REASONS: tuple[tuple[str, str], ...] = (
    (
        r"test_hooks\.py::test_trainer_\w+_hook_system",
        "They count in which order hooks are called: the loader of training is asked for, and its first batch moved, "
        "before fit begins, since a plan is made for that batch, which is then trained on",
    ),
)
"""Of a test that ends otherwise: what its name and message match, and why."""
