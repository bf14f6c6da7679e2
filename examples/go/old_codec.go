//go:build old_grpc
// +build old_grpc

package main

import (
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that is replaced here
	"google.golang.org/protobuf/proto"
)

// Debian's grpc-go (1.33) serializes with the protobuf API before v2, which does not know the messages that
// today's protoc-gen-go makes; its own, of health checks, know no other. With Go modules this is not needed.
type codec struct{ encoding.Codec }

func (c codec) Marshal(v interface{}) ([]byte, error) {
	if message, isNew := v.(proto.Message); isNew {
		return proto.Marshal(message)
	}
	return c.Codec.Marshal(v)
}

func (c codec) Unmarshal(data []byte, v interface{}) error {
	if message, isNew := v.(proto.Message); isNew {
		return proto.Unmarshal(data, message)
	}
	return c.Codec.Unmarshal(data, v)
}

func init() { encoding.RegisterCodec(codec{encoding.GetCodec("proto")}) }
