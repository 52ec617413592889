{{- define "quire.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "quire.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* The settings file; refuses what the chart itself sets. */ -}}
{{- define "quire.settings" -}}
{{- range list "host" "port" "model" "api_key" "api_key_file" "drain_timeout" -}}
{{- if hasKey $.Values.settings . -}}
{{- fail (printf "settings.%s is set by the chart; see the values model, auth, service and drainTimeout" .) -}}
{{- end -}}
{{- end -}}
{{- toYaml .Values.settings -}}
{{- end -}}
