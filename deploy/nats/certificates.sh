#!/bin/sh
# Makes a certificate authority and a certificate for each host, for brokers, gateways and boxes:
#   certificates.sh DIRECTORY HOST...
# DIRECTORY/HOST/ gets ca.pem, own.pem and own.key, to be copied to /etc/penstock/nats of a broker, or to /etc/penstock/tls of a
# gateway or a box. own.conf and own-routes.conf tell a broker the name that its certificate has. DIRECTORY/ca.key signs further
# hosts: keep that file away from all hosts. A second call keeps the authority and makes hosts that are missing.
set -eu
umask 077
if [ "$#" -lt 2 ]; then
  echo "usage: certificates.sh DIRECTORY HOST..." >&2
  exit 2
fi
root=$1
shift
for host in "$@"; do
  case $host in
    *[!A-Za-z0-9._:-]* | -* | .* | "")
      echo "certificates.sh: $host is no name of a host" >&2
      exit 2
      ;;
  esac
done
mkdir -p "$root"
if [ ! -f "$root/ca.key" ]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=Penstock cluster" \
    -addext keyUsage=critical,keyCertSign,cRLSign -keyout "$root/ca.key" -out "$root/ca.pem"
fi
for host in "$@"; do
  place=$root/$host
  mkdir -p "$place"
  # Brokers tell clients and one another their addresses. Without these lines they tell numbers, for which no certificate holds.
  case $host in
    *:*) address="[$host]" ;;
    *) address=$host ;;
  esac
  printf 'server_name: "%s"\nclient_advertise: "%s:4333"\n' "$host" "$address" > "$place/own.conf"
  printf 'advertise: "%s:6333"\n' "$address" > "$place/own-routes.conf"
  if [ -f "$place/own.pem" ]; then continue; fi
  case $host in
    *:*) name=IP:$host ;;
    *[!0-9.]*) name=DNS:$host ;;
    *) name=IP:$host ;;
  esac
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj "/CN=$host" \
    -keyout "$place/own.key" -out "$place/own.csr"
  printf 'subjectAltName=%s,DNS:localhost,IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n' "$name" > "$place/own.ext"
  openssl x509 -req -in "$place/own.csr" -CA "$root/ca.pem" -CAkey "$root/ca.key" -CAcreateserial -days "${DAYS:-825}" \
    -extfile "$place/own.ext" -out "$place/own.pem"
  rm "$place/own.csr" "$place/own.ext"
  cp "$root/ca.pem" "$place/ca.pem"
done
