//go:build old_grpc
// +build old_grpc

package main

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
)

// Debian's grpc-go (1.33) serializes with the protobuf API before v2, which does not know the messages that
// today's protoc-gen-go makes. From grpc-go 1.34 with modules on this is not needed.
type codec struct{}

func (codec) Marshal(v interface{}) ([]byte, error)      { return proto.Marshal(v.(proto.Message)) }
func (codec) Unmarshal(data []byte, v interface{}) error { return proto.Unmarshal(data, v.(proto.Message)) }
func (codec) Name() string                               { return "proto" }

func init() { encoding.RegisterCodec(codec{}) }
