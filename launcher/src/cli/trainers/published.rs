//! Keys of the trainers whose files and lines people bring, from the sources named here. None may be unknown.

use super::{Trainer, find, keys::PEFT, meaning};
use crate::cli::{FileKey, file_key};

/// LLaMA-Factory 0.9.5, `src/llamafactory/hparams/`.
const LLAMA_FACTORY: &str = "\
    template dataset eval_dataset dataset_dir media_dir cutoff_len train_on_prompt mask_history streaming \
    buffer_size mix_strategy interleave_probs overwrite_cache preprocessing_batch_size \
    preprocessing_num_workers max_samples eval_num_beams ignore_pad_token_for_loss val_size \
    eval_on_each_dataset packing neat_packing tool_format default_system enable_thinking preserve_thinking \
    tokenized_path data_shared_file_system task task_dir batch_size seed n_shot save_dir download_mode \
    freeze_trainable_layers freeze_trainable_modules freeze_extra_modules additional_target lora_alpha \
    lora_dropout lora_rank lora_target loraplus_lr_ratio loraplus_lr_embedding use_rslora use_dora pissa_init \
    pissa_iter pissa_convert create_new_adapter module_dropout oft_rank oft_block_size oft_target pref_beta \
    pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma \
    ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards ref_model ref_model_adapters \
    ref_model_quantization_bit reward_model reward_model_adapters reward_model_quantization_bit \
    reward_model_type ld_alpha use_galore galore_target galore_rank galore_update_interval galore_scale \
    galore_proj_type galore_layerwise use_apollo apollo_target apollo_rank apollo_update_interval \
    apollo_scale apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front use_badam \
    badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode \
    badam_verbose use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key \
    swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret pure_bf16 stage finetuning_type use_llama_pro \
    use_adam_mini use_mca use_hyper_parallel hyper_parallel_args use_muon use_dft_loss use_asft_loss \
    asft_alpha use_eaft_loss eaft_alpha freeze_vision_tower freeze_multi_modal_projector \
    freeze_language_model compute_accuracy disable_shuffling early_stopping_steps plot_loss \
    include_effective_tokens_per_second do_sample temperature top_p top_k num_beams max_length max_new_tokens \
    repetition_penalty length_penalty skip_special_tokens model_name_or_path adapter_name_or_path \
    adapter_folder cache_dir use_fast_tokenizer resize_vocab split_special_tokens add_tokens \
    add_special_tokens new_special_tokens_config init_special_tokens model_revision low_cpu_mem_usage \
    rope_scaling flash_attn shift_attn mixture_of_depths use_unsloth use_unsloth_gc enable_liger_kernel \
    moe_aux_loss_coef disable_gradient_checkpointing use_reentrant_gc upcast_layernorm upcast_lmhead_output \
    train_from_scratch infer_backend offload_folder use_kv_cache use_v1_kernels infer_dtype hf_hub_token \
    ms_hub_token om_hub_token print_param_status trust_remote_code quantization_method quantization_bit \
    quantization_type double_quantization quantization_device_map image_max_pixels image_min_pixels \
    image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen \
    use_audio_in_video audio_sampling_rate export_dir export_size export_device export_quantization_bit \
    export_quantization_dataset export_quantization_nsamples export_quantization_maxlen export_legacy_format \
    export_hub_model_id vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config \
    sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend use_kt kt_weight_path \
    kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size \
    compute_dtype device_map model_max_length block_diag_attn ray_num_workers ray_init_kwargs master_addr \
    master_port enable_torch_profiler profiler_output_dir profiler_wait_steps profiler_warmup_steps \
    profiler_active_steps profiler_repeat profiler_record_shapes profiler_profile_memory profiler_with_stack \
    profile_modules fp8 fp8_backend fp8_enable_fsdp_float8_all_gather overwrite_output_dir";

/// ms-swift 4.6, `swift/arguments/` and `swift/trainers/arguments.py`; then names of its versions 2 and 3.
const MS_SWIFT: &str = "\
    tuner_backend tuner_type adapters external_plugins custom_register_path seed model_kwargs \
    enable_npu_model_patch load_args load_data_args packing packing_length packing_num_proc packing_strategy \
    lazy_tokenize use_hf hub_token ddp_timeout ddp_backend ignore_args_error use_swift_lora dataset \
    val_dataset cached_dataset cached_val_dataset split_dataset_ratio data_seed dataset_num_proc \
    load_from_cache_file dataset_shuffle val_dataset_shuffle streaming interleave_prob stopping_strategy \
    shuffle_buffer_size download_mode columns strict remove_unused_columns disable_auto_column_mapping \
    model_name model_author custom_dataset_info decision_drop_instructions decision_subsample_options \
    decision_state_as_text decision_shuffle_fields max_new_tokens temperature top_k top_p repetition_penalty \
    num_beams stream stop_words logprobs top_logprobs structured_outputs_regex model model_type \
    model_revision task_type torch_dtype attn_impl experts_impl new_special_tokens num_labels problem_type \
    rope_scaling device_map max_memory max_model_len local_repo_path init_strategy quant_method quant_bits \
    hqq_axis bnb_4bit_compute_dtype bnb_4bit_quant_type bnb_4bit_use_double_quant bnb_4bit_quant_storage \
    template system max_length truncation_strategy max_pixels agent_template norm_bbox use_chat_template \
    padding_side padding_free loss_scale sequence_parallel_size is_binary_loss_scale template_backend \
    response_prefix enable_thinking preserve_thinking add_non_thinking_prefix disable_ignore_empty_think \
    freeze_parameters freeze_parameters_regex freeze_parameters_ratio trainable_parameters \
    trainable_parameters_regex freeze_llm freeze_vit freeze_aligner target_modules target_regex \
    target_parameters modules_to_save lora_rank lora_alpha lora_dropout lora_bias lora_dtype lorap_lr_ratio \
    use_rslora use_dora lora_ga_batch_size lora_ga_iters lora_ga_max_length lora_ga_direction lora_ga_scale \
    lora_ga_stable_gamma init_weights fourier_n_frequency fourier_scaling boft_block_size boft_block_num \
    boft_n_butterfly_factor boft_dropout vera_rank vera_projection_prng_key vera_dropout vera_d_initial \
    adapter_act adapter_length adalora_target_r adalora_init_r adalora_tinit adalora_tfinal adalora_deltaT \
    adalora_beta1 adalora_beta2 adalora_orth_reg_weight llamapro_num_new_blocks llamapro_num_groups \
    reft_layer_key reft_layers reft_rank reft_intervention_type reft_args swanlab_token swanlab_project \
    swanlab_workspace swanlab_exp_name swanlab_notification_method swanlab_webhook_url swanlab_secret \
    swanlab_sender_email swanlab_receiver_email swanlab_smtp_server swanlab_smtp_port swanlab_email_language \
    swanlab_mode add_version create_checkpoint_symlink output_dir learning_rate eval_strategy fp16 bf16 \
    zero_hpz_partition_size deepspeed_autotp_size fsdp per_device_train_batch_size per_device_eval_batch_size \
    gradient_accumulation_steps gradient_checkpointing vit_gradient_checkpointing \
    gradient_checkpointing_kwargs logging_first_step logging_steps router_aux_loss_coef enable_dft_loss \
    enable_channel_loss safe_serialization max_shard_size weight_decay adam_beta2 lr_scheduler_type \
    lr_scheduler_kwargs report_to dataloader_num_workers dataloader_persistent_workers \
    dataloader_prefetch_factor dataloader_multiprocessing_context use_liger_kernel check_model acc_strategy \
    train_dataloader_shuffle group_by_length max_epochs aligner_lr vit_lr use_logits_to_keep \
    ds3_gather_for_generation resume_only_model optimizer loss_type mrl_dims eval_metric callbacks \
    early_stop_interval eval_use_evalscope eval_dataset eval_dataset_args eval_limit eval_generation_config \
    extra_eval_args use_galore galore_target_modules galore_rank galore_update_proj_gap galore_scale \
    galore_proj_type galore_optim_per_parameter galore_with_embedding galore_quantization galore_proj_quant \
    galore_proj_bits galore_proj_group_size galore_cos_threshold galore_gamma_proj galore_queue_size \
    lisa_activated_layers lisa_step_interval use_flash_ckpt logging_dir warmup_ratio model_id_or_path \
    template_type lora_dropout_p lora_target_modules dtype custom_train_dataset_path custom_val_dataset_path \
    batch_size eval_batch_size dataset_test_ratio add_output_dir_suffix train_dataset_sample \
    val_dataset_sample use_flash_attn self_cognition_sample lora_lr_ratio lora_bias_trainable \
    quantization_bit only_save_model check_dataset_strategy preprocess_num_proc \
    additional_trainable_parameters rescale_image gpu_memory_fraction train_dataset_mix_ratio \
    train_dataset_mix_ds lora_modules_to_save init_lora_weights model_layer_cls_name metric_warmup_step \
    fsdp_num acc_steps tools_prompt lora_target_regex merge_lora ddp_find_unused_parameters save_on_each_node \
    save_strategy disable_tqdm neftune_backend dataset_seed dataset_enable_cache use_profiler eval_human \
    do_sample deepspeed_config_path model_cache_dir train_backend hub_strategy push_hub_strategy sft_type \
    load_dataset_config hub_private_repo gradient_checkpointing_enable preprocess_batch_size save_total_limit \
    test_oom_error loss_name is_instruct_model quant_device_map load_in_8bit bnb_4bit_comp_dtype \
    evaluation_strategy";

/// transformers 5.24, `training_args.py` and `training_args_seq2seq.py`.
const TRANSFORMERS: &str = "\
    output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type \
    lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon \
    optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm \
    label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing \
    activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile \
    torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache \
    neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps \
    logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level \
    log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id \
    trackio_static_space_id eval_strategy eval_steps eval_delay per_device_eval_batch_size \
    prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps \
    include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node \
    save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy \
    hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better \
    ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu \
    accelerator_config parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory \
    dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context \
    dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name \
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend \
    ddp_timeout fsdp fsdp_config deepspeed debug skip_memory_metrics do_train do_eval do_predict \
    resume_from_checkpoint local_rank sortish_sampler predict_with_generate generation_max_length \
    generation_num_beams generation_config";

/// SwissArmyTransformer, `sat/arguments.py`, and `finetune_demo` of CogVLM and CogAgent.
const SAT: &str = "\
    num_layers hidden_size num_attention_heads vocab_size max_sequence_length layernorm_order \
    inner_hidden_size hidden_size_per_attention_head model_parallel_size skip_init use_gpu_initialization \
    layernorm_epsilon hidden_dropout attention_dropout make_vocab_size_divisible_by experiment_name \
    train_iters batch_size lr mode seed zero_stage checkpoint_activations checkpoint_num_layers fp16 bf16 \
    gradient_accumulation_steps epochs log_interval summary_dir save_args lr_decay_iters lr_decay_style \
    lr_decay_ratio warmup weight_decay save load save_interval no_save_rng no_load_rng resume_dataloader \
    distributed_backend local_rank exit_interval eval_batch_size eval_iters eval_interval strict_eval \
    train_data train_data_weights iterable_dataset valid_data test_data split num_workers block_size \
    temperature top_p top_k num_beams length_penalty no_repeat_ngram_size min_tgt_length out_seq_length \
    input_source output_path with_id max_inference_batch_size device tokenizer_type deepspeed \
    deepspeed_config max_length ignore_pad_token_for_loss version from_pretrained local_tokenizer \
    vit_checkpoint_activations use_ptuning pre_seq_len use_lora use_qlora lora_rank layer_range image_length \
    eva_args cross_image_pix batch_from_same_dataset \
    iterable_dataset_eval profiling wandb wandb_project_name prefetch_factor \
    force_train master_port \
    nnodes node_rank master_addr hostfile nproc_per_node rdzv_endpoint num_gpus include \
    exclude";

/// `finetune_demo/peft_lora.py` of CogVLM2 and `train_peft_lora.py` of CogVLM.
const COGVLM2: &str = "\
    lr num_epochs batch_size torch_type save_step train_dataset_rate local_rank lora_rank lora_alpha \
    lora_target lora_dropout warmup_steps max_input_len max_output_len model_path dataset_path save_path \
    ds_config dataset_dir train_rate save_freq save_dir model_dir tokenizer_dir max_length \
    per_device_train_batch_size gradient_accumulation_steps show_progress";

/// `finetune.py`, `finetune_lora.sh` and `finetune_ds.sh` of MiniCPM-V, with the flags of torchrun there.
const OPENBMB: &str = "\
    model_name_or_path llm_type data_path eval_data_path remove_unused_columns label_names \
    prediction_loss_only bf16 bf16_full_eval fp16 fp16_full_eval do_train do_eval tune_vision tune_llm \
    use_lora lora_target_modules model_max_length max_slice_nums max_steps eval_steps output_dir logging_dir \
    logging_strategy per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps \
    evaluation_strategy save_strategy save_steps save_total_limit learning_rate weight_decay adam_beta2 \
    warmup_ratio lr_scheduler_type logging_steps gradient_checkpointing deepspeed report_to scale_resolution \
    lora_r lora_alpha lora_dropout lora_weight_path lora_bias q_lora lora_modules_to_save \
    lora_layer_replication lora_layers_to_transform lora_layers_pattern nproc_per_node nnodes node_rank \
    master_addr master_port cache_dir optim";

/// `src/params.py` of Qwen2-VL-Finetune, and names of its siblings.
const TWO_U1: &str = "\
    tune_merger tune_connector lora_modules show_progress tune_img_projector tune_vision_tower \
    freeze_img_projector freeze_connector connector_lr img_projector_lr num_crops max_num_frames mlp_head_dim \
    mlp_head_dropout loss_type focal_alpha focal_gamma num_labels class_balanced_beta early_stopping_patience \
    early_stopping_threshold beta precompute_ref_log_probs dpo_loss temperature top_p top_k min_p \
    repetition_penalty max_completion_length max_prompt_length eval_image_folder unfreeze_topk_llm \
    unfreeze_topk_vision use_liger tune_mm_vision tune_mm_mlp tune_mm_llm tune_mm_mlp_adapter vision_tower_lr \
    data_flatten lora_namespan_exclude freeze_resampler tune_resampler enable_reasoning use_liger_loss \
    padding_side model_id lora_enable vision_lora use_dora lora_rank lora_alpha lora_dropout lora_weight_path \
    lora_bias vision_lr merger_lr head_lr num_lora_modules double_quant quant_type bits max_seq_length \
    freeze_vision_tower freeze_llm freeze_merger disable_flash_attn2 data_path eval_path lazy_preprocess \
    image_folder image_min_pixels image_max_pixels video_min_pixels video_max_pixels image_resized_width \
    image_resized_height video_resized_width video_resized_height fps nframes";

/// peft 0.21, `LoraConfig`; then keys of prefix tuning.
const LORA_CONFIG: &str = "\
    r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save \
    init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern megatron_config \
    megatron_core trainable_token_indices loftq_config eva_config corda_config lora_ga_config use_dora \
    velora_config alora_invocation_tokens use_qalora qalora_group_size monteclora_config layer_replication \
    runtime_config lora_bias target_parameters use_bdlora arrow_config kasa_config ensure_weight_tying \
    peft_type task_type auto_mapping base_model_name_or_path revision inference_mode peft_version \
    num_virtual_tokens token_dim num_attention_heads num_layers num_transformer_submodules \
    encoder_hidden_size prefix_projection";

#[test]
fn no_key_of_a_published_trainer_is_unknown() {
    let mut unknown = Vec::new();
    for (trainer, keys) in [
        (Trainer::LlamaFactory, LLAMA_FACTORY),
        (Trainer::MsSwift, MS_SWIFT),
        (Trainer::HuggingFace, TRANSFORMERS),
        (Trainer::Sat, SAT),
        (Trainer::CogVlm2, COGVLM2),
        (Trainer::OpenBmb, OPENBMB),
        (Trainer::TwoU1, TWO_U1),
    ] {
        // A key is understood in its trainer's recipe and beside flags of this program.
        for key in keys.split(' ') {
            let is_known = |trainer| {
                meaning(trainer, key).is_some() || !matches!(file_key(key), FileKey::Unknown(_))
            };
            if !is_known(Some(trainer)) || !is_known(None) {
                unknown.push(key);
            }
        }
    }
    let peft = LORA_CONFIG.split(' ');
    unknown.extend(peft.filter(|key| find(PEFT, key).is_none()));
    assert!(unknown.is_empty(), "{unknown:?}");
}
