"""Field numbers of the TensorRT Inference Server API, version 1, as its specification lists them."""

from __future__ import annotations

RPCS = ("Status", "Profile", "Health", "Infer", "ModelControl", "SharedMemoryControl", "Repository")


def _numbered(text: str) -> dict[str, int]:
    words = text.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


MESSAGES = {
    name: _numbered(fields)
    for name, fields in {
        "InferRequestHeader": "batch_size 1 input 2 output 3 correlation_id 4 id 5 flags 6 priority 7 "
        "timeout_microseconds 8",
        "InferRequestHeader.Input": "name 1 dims 2 batch_byte_size 3 shared_memory 4",
        "InferRequestHeader.Output": "name 1 cls 3 shared_memory 4",
        "InferRequestHeader.Output.Class": "count 1",
        "InferSharedMemory": "name 1 offset 2 byte_size 3",
        "InferResponseHeader": "model_name 1 model_version 2 batch_size 3 output 4 id 5",
        "InferResponseHeader.Output": "name 1 raw 2 batch_classes 3 data_type 4",
        "InferResponseHeader.Output.Raw": "dims 1 batch_byte_size 2",
        "InferResponseHeader.Output.Class": "idx 1 value 2 label 3",
        "InferResponseHeader.Output.Classes": "cls 1",
        "RequestStatus": "code 1 msg 2 server_id 3 request_id 4",
        "StatusRequest": "model_name 1",
        "StatusResponse": "request_status 1 server_status 2",
        "ProfileRequest": "cmd 1",
        "ProfileResponse": "request_status 1",
        "HealthRequest": "mode 1",
        "HealthResponse": "request_status 1 health 2",
        "InferRequest": "model_name 1 model_version 2 meta_data 3 raw_input 4",
        "InferResponse": "request_status 1 meta_data 2 raw_output 3",
        "ModelControlRequest": "model_name 1 type 2",
        "ModelControlResponse": "request_status 1",
        "SharedMemoryControlRequest": "register 1 unregister 2 unregister_all 3 status 4",
        "SharedMemoryControlRequest.Register": "name 1 system_shared_memory 2 cuda_shared_memory 3 byte_size 4",
        "SharedMemoryControlRequest.Register.SystemSharedMemory": "shared_memory_key 1 offset 2",
        "SharedMemoryControlRequest.Register.CudaSharedMemory": "raw_handle 1 device_id 2",
        "SharedMemoryControlRequest.Unregister": "name 1",
        "SharedMemoryControlRequest.UnregisterAll": "",
        "SharedMemoryControlRequest.Status": "",
        "SharedMemoryControlResponse": "request_status 1 shared_memory_status 2",
        "SharedMemoryControlResponse.Status": "shared_memory_region 1 region_of_status 2",
        "RepositoryRequest": "index 1",
        "RepositoryResponse": "request_status 1 index 2",
        "StatDuration": "count 1 total_time_ns 2",
        "StatusRequestStats": "success 1",
        "ProfileRequestStats": "success 1",
        "HealthRequestStats": "success 1",
        "ModelControlRequestStats": "success 1",
        "SharedMemoryControlRequestStats": "success 1",
        "RepositoryRequestStats": "success 1",
        "InferRequestStats": "success 1 failed 2 compute 3 queue 4",
        "ModelReadyStateReason": "message 1",
        "ModelVersionStatus": "ready_state 1 infer_stats 2 model_execution_count 3 model_inference_count 4 "
        "ready_state_reason 5 last_inference_timestamp_milliseconds 6",
        "ModelStatus": "config 1 version_status 2",
        "ServerStatus": "id 1 version 2 uptime_ns 3 model_status 4 status_stats 5 profile_stats 6 ready_state 7 "
        "health_stats 8 model_control_stats 9 shm_control_stats 10 repository_stats 11",
        "SharedMemoryRegion": "name 1 system_shared_memory 2 cuda_shared_memory 3 byte_size 5",
        "SharedMemoryRegion.SystemSharedMemory": "shared_memory_key 1 offset 2",
        "SharedMemoryRegion.CudaSharedMemory": "device_id 1",
        "SharedMemoryStatus": "shared_memory_region 2",
        "ModelRepositoryIndex": "models 1",
        "ModelRepositoryIndex.ModelEntry": "name 1",
        "ModelInstanceGroup": "name 1 count 2 gpus 3 kind 4 profile 5",
        "ModelTensorReshape": "shape 1",
        "ModelInput": "name 1 data_type 2 format 3 dims 4 reshape 5 is_shape_tensor 6 allow_ragged_batch 7",
        "ModelOutput": "name 1 data_type 2 dims 3 label_filename 4 reshape 5 is_shape_tensor 6",
        "ModelVersionPolicy": "latest 1 all 2 specific 3",
        "ModelVersionPolicy.Latest": "num_versions 1",
        "ModelVersionPolicy.All": "",
        "ModelVersionPolicy.Specific": "versions 1",
        "ModelOptimizationPolicy": "graph 1 priority 2 cuda 3",
        "ModelOptimizationPolicy.Graph": "level 1",
        "ModelOptimizationPolicy.Cuda": "graphs 1",
        "ModelDynamicBatching": "preferred_batch_size 1 max_queue_delay_microseconds 2 preserve_ordering 3",
        "ModelSequenceBatching": "max_sequence_idle_microseconds 1 control_input 2 direct 3 oldest 4",
        "ModelSequenceBatching.ControlInput": "name 1 control 2",
        "ModelSequenceBatching.Control": "kind 1 int32_false_true 2 fp32_false_true 3 data_type 4",
        "ModelEnsembling": "step 1",
        "ModelEnsembling.Step": "model_name 1 model_version 2 input_map 3 output_map 4",
        "ModelParameter": "string_value 1",
        "ModelConfig": "name 1 platform 2 version_policy 3 max_batch_size 4 input 5 output 6 instance_group 7 "
        "default_model_filename 8 cc_model_filenames 9 metric_tags 10 dynamic_batching 11 optimization 12 "
        "sequence_batching 13 parameters 14 ensemble_scheduling 15 model_warmup 16",
    }.items()
}
ENUMS = {
    name: _numbered(values)
    for name, values in {
        "InferRequestHeader.Flag": "FLAG_NONE 0 FLAG_SEQUENCE_START 1 FLAG_SEQUENCE_END 2",
        "RequestStatusCode": "INVALID 0 SUCCESS 1 UNKNOWN 2 INTERNAL 3 NOT_FOUND 4 INVALID_ARG 5 UNAVAILABLE 6 "
        "UNSUPPORTED 7 ALREADY_EXISTS 8",
        "ModelControlRequest.Type": "UNLOAD 0 LOAD 1",
        "ModelReadyState": "MODEL_UNKNOWN 0 MODEL_READY 1 MODEL_UNAVAILABLE 2 MODEL_LOADING 3 MODEL_UNLOADING 4",
        "ServerReadyState": "SERVER_INVALID 0 SERVER_INITIALIZING 1 SERVER_READY 2 SERVER_EXITING 3 "
        "SERVER_FAILED_TO_INITIALIZE 10",
        "DataType": "TYPE_INVALID 0 TYPE_BOOL 1 TYPE_UINT8 2 TYPE_UINT16 3 TYPE_UINT32 4 TYPE_UINT64 5 "
        "TYPE_INT8 6 TYPE_INT16 7 TYPE_INT32 8 TYPE_INT64 9 TYPE_FP16 10 TYPE_FP32 11 TYPE_FP64 12 TYPE_STRING 13",
        "ModelInstanceGroup.Kind": "KIND_AUTO 0 KIND_GPU 1 KIND_CPU 2 KIND_MODEL 3",
        "ModelInput.Format": "FORMAT_NONE 0 FORMAT_NHWC 1 FORMAT_NCHW 2",
        "ModelOptimizationPolicy.ModelPriority": "PRIORITY_DEFAULT 0 PRIORITY_MAX 1 PRIORITY_MIN 2",
        "ModelSequenceBatching.Control.Kind": "CONTROL_SEQUENCE_START 0 CONTROL_SEQUENCE_READY 1 "
        "CONTROL_SEQUENCE_END 2 CONTROL_SEQUENCE_CORRID 3",
    }.items()
}
