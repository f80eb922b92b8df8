{{- define "triton-omni.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "triton-omni.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "triton-omni.labels" -}}
{{ include "triton-omni.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* The volume that holds the checkpoint, as YAML; empty: there is none. */}}
{{- define "triton-omni.checkpointVolume" -}}
{{- with .Values.checkpoint -}}
{{- $given := list -}}
{{- if .existingClaim }}{{ $given = append $given "existingClaim" }}{{ end -}}
{{- if .volume }}{{ $given = append $given "volume" }}{{ end -}}
{{- if .create.enabled }}{{ $given = append $given "create.enabled" }}{{ end -}}
{{- if gt (len $given) 1 }}{{ fail (printf "checkpoint: %s exclude each other" (join " and " $given)) }}{{ end -}}
{{- if .volume -}}
{{ toYaml .volume }}
{{- else if $given -}}
persistentVolumeClaim:
  claimName: {{ .existingClaim | default (printf "%s-checkpoint" (include "triton-omni.name" $)) }}
{{- if .existingClaim }}
  readOnly: true
{{- end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Arguments of the container, as YAML; empty: there are none. */}}
{{- define "triton-omni.args" -}}
{{- $args := list -}}
{{- with .Values.tritonPorts -}}
{{- if .enabled -}}
{{- $args = list "--triton-host" "0.0.0.0" "--grpc-port" (toString .grpc) "--http-port" (toString .http) "--metrics-port" (toString .metrics) -}}
{{- end -}}
{{- end -}}
{{- with .Values.server.frontendArgs }}{{ $args = concat $args (list "--") . }}{{ end -}}
{{- if $args }}{{ toYaml $args }}{{ end -}}
{{- end -}}
